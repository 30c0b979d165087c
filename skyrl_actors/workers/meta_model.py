"""Build a network without weights, and fill a rank's part from the base model's files."""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from accelerate import init_empty_weights
from torch import Tensor, nn
from transformers import AutoConfig

from skyrl_actors.messages.errors import ConfigError
from skyrl_actors.workers.auto_classes import attention_for, auto_class
from skyrl_actors.workers.base_files import BaseTensors, quantization_of
from skyrl_actors.workers.buffers import stored_buffers
from skyrl_actors.workers.network import VALUE_BIAS, VALUE_WEIGHT
from skyrl_actors.workers.published_names import Published, StoredForm
from skyrl_actors.workers.tensor_files import InMemory, Shape, Source

INSIDE = "causal_lm."  # prefix of a network's names in its `whole` module


def shell(folder: str, dtype: torch.dtype) -> Any:
    """Return the base model's modules. Parameters are on the meta device; buffers are real."""
    config = dense(AutoConfig.from_pretrained(folder))
    with init_empty_weights(include_buffers=False):
        module = auto_class(config).from_config(
            config, dtype=dtype, attn_implementation=attention_for(config)
        )
    module.tie_weights()
    return module


def dense(config: Any) -> Any:
    """Return the config of the same model with weights that are not quantized."""
    if hasattr(config, "quantization_config"):
        del config.quantization_config
    return config


class ValueHead(nn.Linear):
    """An output layer for values, which computes in float32 whatever its weights have."""

    def forward(self, input: Tensor) -> Tensor:
        return nn.functional.linear(input, self.weight.float(), self.bias.float())


def value_head_for(module: Any, is_critic: bool) -> nn.Linear | None:
    """Return a value head of zeros for a critic, so that first advantages are undisturbed."""
    if not is_critic:
        return None
    if not module.config.get_text_config().tie_word_embeddings:
        module.lm_head.requires_grad_(False)  # an untied head is not part of the values
    head = ValueHead(int(module.config.get_text_config().hidden_size), 1)
    for parameter in head.parameters():
        nn.init.zeros_(parameter)
    return head


def trained_names(whole: nn.Module) -> dict[str, nn.Parameter]:
    """Return the trained parameters by name."""
    return {
        name: parameter for name, parameter in own_names(whole).items() if parameter.requires_grad
    }


def own_names(whole: nn.Module) -> dict[str, nn.Parameter]:
    """Return a network's parameters by their names in the base model's files, tied ones once."""
    return {name.removeprefix(INSIDE): parameter for name, parameter in whole.named_parameters()}


@contextmanager
def weights_of(
    folder: str, dtype: torch.dtype, form: StoredForm, shapes: Mapping[str, Shape]
) -> Iterator[Source]:
    """Yield the base model's weights and stored buffers under the names of its modules.

    They come directly from the files, so that a rank reads only its own part. The weights of a
    family whose files hold them in another order are converted in host memory as a whole.

    Raises ConfigError when weights are missing or have other shapes. The value head is not part of
    a base model.
    """
    wanted = {
        name: shape for name, shape in shapes.items() if name not in (VALUE_WEIGHT, VALUE_BIAS)
    }
    with BaseTensors(Path(folder)) as files:
        found = Published(files, form.of_weights(wanted), wanted)
        if found.shapes == wanted:
            yield found
            return
    source: Source = found
    if quantization_of(Path(folder)) is None:
        made_by = auto_class(AutoConfig.from_pretrained(folder))
        module: Any = made_by.from_pretrained(folder, dtype=dtype)
        source = InMemory({**dict(module.named_parameters()), **stored_buffers(module)})
    missing = [name for name, shape in wanted.items() if source.shapes.get(name) != shape]
    if missing:
        raise ConfigError(
            f"{Path(folder).name} has no {missing[0]} of shape {wanted[missing[0]]} "
            f"({len(missing)} such tensors)"
        )
    yield source
