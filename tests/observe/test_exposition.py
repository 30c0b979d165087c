"""The text of `/metrics`, read by Prometheus' own parser."""

from prometheus_client.parser import text_string_to_metric_families

from skyrl_actors.observe.exposition import Exposition

OF_S = {"service": "s"}


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted(sample.labels.items()))): sample.value
        for family in text_string_to_metric_families(text)
        for sample in family.samples
    }


def test_values_are_shown_with_their_tags_and_newer_ones_win():
    made = Exposition()
    made.set("rss_bytes", 5, {**OF_S, "actor": 'engine "0"'})
    made.add("transfers", 2, OF_S)
    made.add("transfers", 1, OF_S)
    made.set("open_requests", 7, OF_S)
    found = samples(made.text("s", {("open_requests", ()): 8.0}, lambda tenant: True))
    assert found == {
        ("skyrl_actors_rss_bytes", (("actor", 'engine "0"'), ("service", "s"))): 5,
        ("skyrl_actors_transfers_total", (("service", "s"),)): 3,
        ("skyrl_actors_open_requests", (("service", "s"),)): 8,
    }


def test_only_rows_of_visible_tenants_are_shown():
    fresh = {
        ("sampled_tokens", (("tenant", "ann"),)): 3.0,
        ("sampled_tokens", (("tenant", "bob"),)): 4.0,
        ("recoveries", ()): 1.0,
    }
    found = samples(Exposition().text("s", fresh, lambda tenant: tenant == "ann"))
    assert sorted(found.values()) == [1, 3]


def test_gauges_of_ended_parts_go_and_counters_stay():
    made = Exposition()
    made.set("restarts", 1, {"service": "s:a", "actor": "policy"})
    made.set("restarts", 2, {"service": "s:b", "actor": "policy"})
    made.add("transfers", 3, {"service": "s:a"})
    made.forget_gauges("s:a")
    assert sorted(samples(made.text("s", {}, lambda tenant: True)).values()) == [2, 3]
