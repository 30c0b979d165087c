"""The measurements of the GPU script that need torch only, through the real transfer."""

from bench.gpu.engines import Bench


def test_the_script_measures_a_transfer_between_two_processes_without_vllm():
    bench = Bench(tiny=True)
    found = bench.offload() | bench.packing() | bench.lending()
    assert {
        "offload_ratio",
        "link_down_gb_per_s",
        "packing_gb_per_s",
        "ipc_transfer_gb_per_s",
    } <= set(found)
    assert all(value > 0 for value in found.values())
