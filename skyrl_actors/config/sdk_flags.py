"""The flags that the service sends to SDKs, under the names of the protocol."""

from collections.abc import Mapping
from dataclasses import dataclass
from difflib import get_close_matches


@dataclass(frozen=True, slots=True)
class SdkFlag:
    """A flag of the protocol: its default, and what true means."""

    default: bool
    meaning: str


FLAGS = {
    "parallel_fwdbwd_chunks": SdkFlag(
        False,
        "SDKs send the chunks of a batch in parallel; this service still computes them one after "
        "another",
    ),
    "proto_compress_fwdbwd": SdkFlag(False, "SDKs compress bodies with zstd; for slow networks"),
    "proto_write_fwdbwd": SdkFlag(False, "SDKs 0.22.7 to 0.24 also send protobuf bodies"),
    "fwd_via_fwdbwd": SdkFlag(
        False,
        "SDKs 0.22.7 to 0.24 send `forward` as a protobuf `forward_backward` without gradient; "
        "needs proto_write_fwdbwd",
    ),
    "create_model_via_load_weights": SdkFlag(
        False, "SDKs from 0.24.1 create a model from a checkpoint with one request"
    ),
    "sample_use_retrieve_futures": SdkFlag(False, "SDKs use one poll for all samples of a sampler"),
    "sample_join_sampling_session": SdkFlag(
        False, "copies of a sampling client request a number of their own"
    ),
    "sample_cancel_enabled": SdkFlag(True, "SDKs cancel samples that no caller awaits"),
    "custom_loss_server_side": SdkFlag(
        False, "the workers run losses that `create_custom_loss` traced"
    ),
    "use_pyqwest_transport": SdkFlag(True, "SDKs use the HTTP client pyqwest"),
    "pjwt_auth_enabled": SdkFlag(
        False, "SDKs exchange their key for a token that expires; needs API keys"
    ),
}


def with_defaults(given: Mapping[str, bool]) -> dict[str, bool]:
    """Return the value of every flag.

    Raises:
        ValueError: A given name is no flag.
    """
    for name in given:
        if name not in FLAGS:
            close = get_close_matches(name, FLAGS, n=1)
            hint = f"did you mean {close[0]}? " if close else ""
            raise ValueError(f"{name} is no flag of SDKs; {hint}allowed here: {', '.join(FLAGS)}")
    return {name: given.get(name, flag.default) for name, flag in FLAGS.items()}
