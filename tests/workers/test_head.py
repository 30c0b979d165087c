"""The chunked head equals full logits in float64, with each way to compute the gradient."""

import itertools

import pytest
import torch
import torch._dynamo
import torch._inductor.config
import torch.nn.functional as F

from skyrl_actors.workers import chunk_math, head
from skyrl_actors.workers.head import HeadSegment, score

T, H, V = 23, 12, 50


def tensors(trained: bool, low_rank: bool, targets: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(3)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    made = {"hidden": normal(T, H).requires_grad_(), "weight": normal(V, H).requires_grad_(trained)}
    if low_rank:
        made |= {"a": normal(3, H).requires_grad_(), "b": normal(V, 3).requires_grad_()}
    shape = (T, targets) if targets else (T,)
    made["targets"] = torch.randint(0, V, shape, generator=generator)
    made["of_logprobs"], made["of_entropy"] = normal(*shape), normal(T)
    return made


def plain(
    x: dict[str, torch.Tensor], softcap: float | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = x["hidden"] @ x["weight"].t()
    if "a" in x:  # on the first 9 tokens
        low_rank = (x["hidden"][:9] @ x["a"].t()) @ x["b"].t() * 0.7
        logits = torch.cat([logits[:9] + low_rank, logits[9:]])
    if softcap is not None:
        logits = softcap * torch.tanh(logits / softcap)
    log_p = F.log_softmax(logits, -1)
    wide = x["targets"] if x["targets"].ndim == 2 else x["targets"][:, None]
    return log_p.gather(1, wide).view(x["targets"].shape), -(log_p.exp() * log_p).sum(-1)


SWITCH = [False, True]
CASES = list(itertools.product(SWITCH, SWITCH, [0, 4], SWITCH, SWITCH, [None, 2.5]))


@pytest.mark.parametrize(
    ("trained", "low_rank", "targets", "keep", "with_entropy", "softcap"), CASES
)
def test_values_and_gradients_equal_float64(
    monkeypatch: pytest.MonkeyPatch,
    trained: bool,
    low_rank: bool,
    targets: int,
    keep: bool,
    with_entropy: bool,
    softcap: float | None,
):
    monkeypatch.setattr(head, "CHUNK_LOGITS", 5 * V)
    monkeypatch.setattr(head, "KEPT_LOGITS", T * V if keep else 0)
    x = tensors(trained, low_rank, targets)
    segments = [
        HeadSegment(num_tokens=9, a=x.get("a"), b=x.get("b"), scale=0.7),
        HeadSegment(num_tokens=T - 9),
    ]
    leaves = [
        x[name] for name in ("hidden", "weight", "a", "b") if name in x and x[name].requires_grad
    ]

    def total(found: tuple[torch.Tensor, torch.Tensor]) -> torch.Tensor:
        loss = (found[0] * x["of_logprobs"]).sum()
        return loss + (found[1] * x["of_entropy"]).sum() if with_entropy else loss

    ours = score(
        x["hidden"],
        x["weight"],
        x["targets"],
        segments,
        entropy_gradient=with_entropy,
        softcap=softcap,
    )
    wanted = plain(x, softcap)
    for a, b in zip(ours, wanted, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-10, atol=1e-12)
    for a, b in zip(
        torch.autograd.grad(total(ours), leaves),
        torch.autograd.grad(total(wanted), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("trained", "low_rank", "targets", "with_entropy"),
    [(False, False, 0, False), (True, True, 4, True)],
)
@pytest.mark.parametrize("softcap", [None, 2.5])
def test_the_compiled_math_equals_float64(
    monkeypatch: pytest.MonkeyPatch,
    trained: bool,
    low_rank: bool,
    targets: int,
    with_entropy: bool,
    softcap: float | None,
):
    """Compile the functions of the GPU for the CPU, in the same places."""
    monkeypatch.setattr(head, "COMPILED_ON", ("cpu",))
    test_values_and_gradients_equal_float64(
        monkeypatch, trained, low_rank, targets, False, with_entropy, softcap
    )


def test_without_a_compiler_the_head_runs_uncompiled(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    monkeypatch.setattr(head, "COMPILED_ON", ("cpu",))
    chunk_math._compiled.cache_clear()
    torch._dynamo.reset()
    try:
        absent = {"cpp.cxx": ("no-such-compiler",), "force_disable_caches": True}
        with torch._inductor.config.patch(absent):
            test_values_and_gradients_equal_float64(
                monkeypatch, False, False, 0, False, False, None
            )
    finally:
        chunk_math._compiled.cache_clear()
        torch._dynamo.reset()
    assert "the output layer is not compiled" in caplog.text


@pytest.mark.parametrize("low_rank", [False, True])
def test_uncounted_tokens_have_values_and_no_gradient(low_rank: bool):
    x = tensors(False, low_rank, 0)
    counted = torch.arange(T) % 3 != 1
    segments = [
        HeadSegment(num_tokens=9, a=x.get("a"), b=x.get("b"), scale=0.7),
        HeadSegment(num_tokens=T - 9),
    ]
    logprobs, entropy = score(x["hidden"], x["weight"], x["targets"], segments, counted)
    wanted, wanted_entropy = plain(x)
    torch.testing.assert_close(logprobs, wanted, rtol=1e-10, atol=1e-12)
    torch.testing.assert_close(entropy, wanted_entropy, rtol=1e-10, atol=1e-12)
    leaves = [x[name] for name in ("hidden", "a", "b") if name in x]
    slope = x["of_logprobs"] * counted
    for a, b in zip(
        torch.autograd.grad((logprobs * slope).sum(), leaves),
        torch.autograd.grad((wanted * slope).sum(), leaves),
        strict=True,
    ):
        torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-11)
    skipped, _ = score(
        x["hidden"], x["weight"], x["targets"], segments, counted, score_uncounted=False
    )
    torch.testing.assert_close(skipped, wanted * counted, rtol=1e-10, atol=1e-12)


def test_the_frozen_head_saves_no_tensor_as_wide_as_the_vocabulary():
    """Checked on the tensors that autograd saves for the backward pass."""
    x = tensors(False, False, 0)
    sizes: list[int] = []

    def note(tensor: torch.Tensor) -> torch.Tensor:
        sizes.append(tensor.numel())
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(note, lambda tensor: tensor):
        score(x["hidden"], x["weight"], x["targets"], [HeadSegment(num_tokens=T)])
    assert sizes and max(sizes) == T * H


def test_a_nearly_certain_token_has_an_exact_gradient_in_bfloat16():
    """Only 1 − p is left of its gradient.

    Rounded to bfloat16 before the difference, it would be 0, or a fifth too small.
    """
    torch.manual_seed(0)
    weight = torch.randn(V, H)
    targets = torch.randint(0, V, (T,))
    hidden = weight[targets] * torch.linspace(0.5, 1.2, T)[:, None]
    wide = hidden.double().requires_grad_()
    log_p, _ = plain({"hidden": wide, "weight": weight.double(), "targets": targets})
    assert float(log_p.detach().exp().max()) > 0.99
    (wanted,) = torch.autograd.grad(log_p.sum(), wide)
    low = hidden.bfloat16().requires_grad_()
    (found,) = torch.autograd.grad(
        score(low, weight.bfloat16(), targets, [HeadSegment(num_tokens=T)])[0].sum(), low
    )
    wide_of_low = low.detach().double().requires_grad_()
    again, _ = plain(
        {"hidden": wide_of_low, "weight": weight.bfloat16().double(), "targets": targets}
    )
    (rounded,) = torch.autograd.grad(again.sum(), wide_of_low)
    assert float((found.double() - rounded).norm() / rounded.norm()) < 0.01
    # There 1 − p is lost in any precision of the computation.
    beyond_float32 = again.detach().exp() > 0.9999
    for row in (~beyond_float32).nonzero()[:, 0].tolist():
        assert float((found[row].double() - rounded[row]).norm() / rounded[row].norm()) < 0.05, (
            float(again[row].detach().exp())
        )
    assert wanted.isfinite().all()


def test_the_gradient_of_a_trained_head_in_bfloat16_does_not_depend_on_the_number_of_chunks(
    monkeypatch: pytest.MonkeyPatch,
):
    """It is accumulated in float32, so many chunks are as close to float64 as one chunk."""
    torch.manual_seed(0)
    tokens, width, words = 2048, 32, 1024
    hidden, weight = (
        torch.randn(tokens, width).bfloat16(),
        (torch.randn(words, width) * 0.3).bfloat16(),
    )
    targets, slopes = torch.randint(0, words, (tokens,)), torch.randn(tokens)
    monkeypatch.setattr(head, "KEPT_LOGITS", 0)
    monkeypatch.setattr(head, "PRODUCT_NUMBERS", 300 * width)  # 1024 words are not a multiple of it

    def gradient(chunk: int, dtype: torch.dtype) -> torch.Tensor:
        monkeypatch.setattr(head, "CHUNK_LOGITS", chunk * words)
        leaf = weight.to(dtype).requires_grad_()
        logprobs, _ = score(hidden.to(dtype), leaf, targets, [HeadSegment(num_tokens=tokens)])
        (found,) = torch.autograd.grad((logprobs * slopes.to(logprobs.dtype)).sum(), leaf)
        assert found.dtype == dtype
        return found.double()

    exact = gradient(tokens, torch.float64)
    errors = [
        float((gradient(chunk, torch.bfloat16) - exact).norm() / exact.norm())
        for chunk in (tokens, 16)
    ]
    assert errors[1] < 1.3 * errors[0] < 0.005, errors  # each product is rounded once


def test_segments_that_leave_tokens_out_are_refused():
    x = tensors(False, False, 0)
    with pytest.raises(ValueError, match="segments of 9 tokens were given for 23 tokens"):
        score(x["hidden"], x["weight"], x["targets"], [HeadSegment(num_tokens=9)])
