"""Create the models of a reinforcement learning run, and move its reference."""

from skyrl_actors.config.algorithms import MovingReference
from skyrl_actors.config.job import RlConfig
from skyrl_actors.jobs.adapters import adapter_of, untrained_adapter
from skyrl_actors.jobs.session import ServiceSession
from skyrl_actors.messages.model import LoraSpec, Role


class RlModels:
    """The ids of policy, critic and reference; empty for a model that the run does not use."""

    def __init__(self, config: RlConfig, session: ServiceSession, lora_alpha: float):
        self._config = config
        self._session = session
        self._lora_alpha = lora_alpha
        self.policy = self.critic = self.reference = ""

    async def create(self, saved: dict[str, str] | None) -> None:
        """Create the models, from the paths of a checkpoint if the run continues from one."""
        config, session = self._config, self._session
        if saved is not None:
            self.policy = await session.create_from(saved["policy"], with_optimizer=True)
            if "critic" in saved:
                self.critic = await session.create_from(saved["critic"], with_optimizer=True)
            if "reference" in saved:
                self.reference = await session.create_from(saved["reference"])
                return
        else:
            self.policy = (
                await session.create("policy", self._lora(), config.seed)
                if config.init_from is None
                else await session.create_from(config.init_from)
            )
            if config.uses_critic:
                self.critic = await session.create("critic", self._lora(), config.seed + 1)
        if config.needs_reference:
            self.reference = await self._created_reference()

    async def _created_reference(self) -> str:
        config, session = self._config, self._session
        if config.reference.type == "base":
            return await session.create("policy", untrained_adapter(config))
        if config.reference.type == "checkpoint":
            return await session.create_from(config.reference.path)
        if config.init_from is not None:  # a moving reference begins as the policy
            return await session.create_from(config.init_from)
        return await session.create("policy", self._lora(), config.seed)

    def _lora(self) -> LoraSpec | None:
        return adapter_of(self._config, self._lora_alpha)

    def kept(self) -> dict[str, str]:
        """Return the ids of the models that a checkpoint contains."""
        moving = isinstance(self._config.reference, MovingReference)
        models = {
            "policy": self.policy,
            "critic": self.critic,
            "reference": self.reference if moving else "",
        }
        return {part: model_id for part, model_id in models.items() if model_id}

    def trained_roles(self, step: int) -> list[Role]:
        """Return the roles whose models train in this iteration."""
        if not self.critic:
            return ["policy"]
        return ["critic"] if step <= self._config.critic_warmup else ["policy", "critic"]

    async def move_reference(self, step: int) -> None:
        """Copy the policy to a moving reference, or mix it in, when this iteration is due."""
        reference, session = self._config.reference, self._session
        moving = isinstance(reference, MovingReference)
        if not (self.reference and moving and step % reference.every == 0):
            return
        saved = await session.save(self.policy, "reference")
        if reference.type == "periodic":
            await session.load(self.reference, saved.path)
        else:
            mean = await session.save(self.reference, "reference-mean")
            await session.load(
                self.reference, saved.path, mixed_with=mean.path, share=1 - reference.decay
            )
