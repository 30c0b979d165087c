"""`GET /metrics`, for Prometheus servers that scrape the endpoint itself."""

from pathlib import Path

from prometheus_client.parser import text_string_to_metric_families

from skyrl_actors.config.cluster import HttpConfig
from skyrl_actors.config.keys import digest_of
from skyrl_actors.messages.keys import StoredKey
from tests.api.local import config_for, edge
from tests.api.test_stored_keys import holder, keys_of
from tests.api.test_usage import ANN, BOB, ROOT, sampled


def tenants_in(text: str) -> set[str]:
    families = {family.name: family for family in text_string_to_metric_families(text)}
    return {sample.labels["tenant"] for sample in families["skyrl_actors_sampled_tokens"].samples}


async def test_without_keys_everybody_reads_all(tmp_path: Path):
    async with edge(config_for(tmp_path)) as http:
        await sampled(http)
        answer = await http.get("http://localhost/metrics")
        assert answer.headers["content-type"].startswith("text/plain; version=0.0.4")
        assert 'skyrl_actors_operations_total{outcome="ok",service="' in answer.text
        assert "-" in tenants_in(answer.text)


async def test_a_key_reads_its_own_rows_and_an_admin_those_of_all(tmp_path: Path):
    http = HttpConfig(api_keys=(f"ann={ANN}", f"bob={BOB}"))
    async with edge(config_for(tmp_path, http=http)) as anyone:
        admin = StoredKey(digest=digest_of(ROOT), name="ops", role="admin", created_at=1.0)
        await keys_of(anyone).add_key(admin, "eve")
        for key in (ANN, BOB):
            await sampled(holder(anyone, key))
        assert (await anyone.get("http://localhost/metrics")).status_code == 401
        read = {
            key: await holder(anyone, key).get("http://localhost/metrics") for key in (ANN, ROOT)
        }
        assert tenants_in(read[ANN].text) == {"ann"}
        assert {"ann", "bob"} <= tenants_in(read[ROOT].text)
        bearer = {"Authorization": f"Bearer {ANN}"}  # as Prometheus sends it
        assert (await anyone.get("http://localhost/metrics", headers=bearer)).status_code == 200
