"""simulation.client_gpus beside Ray's own accounting, with GPUs that Ray is told of and that are not there."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from fedstill.common.config import ConfigError
from fedstill.common.config.files import load_run
from fedstill.deploy.launch.simulation import check_actors, simulation_settings

ray = pytest.importorskip("ray")
CPUS, GPUS = 16, 2


@pytest.fixture(scope="module")
def cluster() -> Iterator[None]:
    ray.init(num_cpus=CPUS, num_gpus=GPUS, include_dashboard=False, logging_level="ERROR", log_to_driver=False)
    yield
    ray.shutdown()


@pytest.mark.parametrize("share", [0.25, 0.3, 0.5, 1.0, 2.0])
def test_as_many_sites_are_let_through_as_ray_has_actors_for(cluster: None, share: float) -> None:
    from flwr.simulation.ray_transport.ray_actor import pool_size_from_resources

    text = "[simulation]\ncpus = {}\ngpus = {}\nclient_gpus = {}\n[[sites]]\nname = 's'\ncount = {}\n"
    settings = simulation_settings(load_run(text.format(CPUS, GPUS, share, 1)))
    told = {"num_cpus": settings["client_resources_num_cpus"], "num_gpus": settings["client_resources_num_gpus"]}
    actors = pool_size_from_resources(told)
    check_actors(load_run(text.format(CPUS, GPUS, share, actors)))
    with pytest.raises(ConfigError, match=f"this machine gives {actors}"):
        check_actors(load_run(text.format(CPUS, GPUS, share, actors + 1)))


def test_ray_hands_out_no_more_gpu_than_there_is(cluster: None) -> None:
    """Eight quarters of two GPUs run at the same time; the ninth actor waits."""

    @ray.remote(num_cpus=1, num_gpus=0.25)
    class Client:
        def here(self) -> list[int]:
            found: list[int] = ray.get_gpu_ids()
            return found

    clients = [Client.remote() for _ in range(9)]
    ready, waiting = ray.wait([client.here.remote() for client in clients], num_returns=9, timeout=20)
    assert (len(ready), len(waiting)) == (8, 1)
    assert sorted(gpu for one in ray.get(ready) for gpu in one) == [0] * 4 + [1] * 4
    for client in clients:
        ray.kill(client)
