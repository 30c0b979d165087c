"""vLLM's LoRA wrappers: which output layers get one, and parts of adapters that none computes."""

from types import SimpleNamespace

import pytest
from torch import device, empty, nn
from vllm.model_executor.layers.vocab_parallel_embedding import VocabParallelEmbedding

from skyrl_actors.engines.lora_wrappers import give_head, refuse_unused
from skyrl_actors.engines.split_projections import interleaved


def test_a_model_gets_an_output_layer_if_its_logits_come_from_the_embedding():
    with device("meta"):
        embedding = VocabParallelEmbedding.__new__(VocabParallelEmbedding)
        nn.Module.__init__(embedding)
        embedding.weight = nn.Parameter(empty(8, 4))
    model = nn.Module()
    model.model = nn.Module()
    model.model.embed_tokens = embedding
    assert not give_head(model)
    model.logits_processor = nn.Module()
    assert give_head(model)
    assert model.lm_head.weight is embedding.weight
    assert [*model.state_dict()] == ["model.embed_tokens.weight"]  # updates find it by this name
    owner = SimpleNamespace(lm_head=1, logits_processor=1)
    assert give_head(owner)
    assert owner.lm_head == 1
    assert not give_head(SimpleNamespace(logits_processor=1))


def test_an_adapter_with_a_part_that_no_layer_computes_is_refused():
    registered: dict[int, SimpleNamespace] = {}
    manager = SimpleNamespace(
        modules={"model.layers.0.block_sparse_moe.experts": 1},
        _registered_adapters=registered,
        _add_adapter=lambda adapter: registered.update({adapter.id: adapter}),
    )
    refuse_unused(manager)
    manager._add_adapter(SimpleNamespace(id=1, loras=dict(manager.modules)))
    other = SimpleNamespace(id=2, loras={"model.layers.0.mlp.experts": 1})
    with pytest.raises(ValueError, match=r"does not compute 1 part\(s\) .*layers\.0\.mlp\.experts"):
        manager._add_adapter(other)
    assert [*registered] == [1]


def test_projections_alternate_by_groups_of_heads():
    # Two groups: queries 0-1, keys 2-3, values 4-7, gate 8-11, one half of each in a group.
    order = interleaved((2, 2, 4, 4), groups=2)
    assert order.tolist() == [0, 2, 4, 5, 8, 9, 1, 3, 6, 7, 10, 11]
    assert interleaved((2, 2, 4, 4), groups=1).tolist() == list(range(12))
