"""How do many machines serve one model? As an application of Ray Serve: replicas of a chain, and who asks them.

`serve deploy` takes it from a YAML file (deploy/ray_serve.yaml), which says how many replicas there are.
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator
from typing import Any

try:
    from ray import serve
except ModuleNotFoundError as error:
    if error.name is None or error.name.split(".")[0] != "ray":
        raise
    raise ModuleNotFoundError("Ray Serve is not installed: pip install 'hf-mlspec[ray,serve]'", name="ray") from error

from starlette.requests import Request
from starlette.responses import Response

from .forwarding import forwarded
from .limits import Limits
from .replica import Replica, Served

_BEGINNINGS = 256  # of prompts that a replica is remembered for


@serve.deployment(max_ongoing_requests=1000, health_check_period_s=5, health_check_timeout_s=10)
class Chain:
    """A replica: a model with its levels on a device of its own."""

    def __init__(self, served: Served) -> None:
        self.replica = Replica(served)

    @serve.multiplexed(max_num_models_per_replica=_BEGINNINGS)
    async def _kept(self, beginning: str) -> str:
        """Ray prefers replicas that were asked for the same beginning: they may have kept its keys and values."""
        return beginning

    async def answered(self, beginning: str, parts: tuple) -> AsyncIterator[dict[str, Any]]:
        if beginning:
            await self._kept(beginning)
        async for message in self.replica.answered(*parts):
            yield message

    def check_health(self) -> None:
        """Ray replaces a replica for which this raises."""
        self.replica.require_healthy()


@serve.deployment(max_ongoing_requests=10_000)
class Front:
    """Reads requests, and lets a replica answer."""

    def __init__(self, chain: Any, most: int, keeps_prefixes: bool) -> None:
        self.chain, self.most, self.keeps_prefixes = chain, most, keeps_prefixes

    async def __call__(self, request: Request) -> Response:
        return await forwarded(request, self._ask, self.most)

    async def _ask(self, beginning: str, parts: tuple) -> AsyncGenerator[dict[str, Any]]:
        beginning = beginning if self.keeps_prefixes else ""
        found = self.chain.options(stream=True, multiplexed_model_id=beginning).answered.remote(beginning, parts)
        try:
            async for message in found:
                yield message
        finally:
            found.cancel()  # nobody reads on


def application(args: dict[str, Any]) -> serve.Application:
    """What `import_path` of a YAML file names. args: of `Served`; ValueError for what cannot be."""
    served = Served.of(args)
    return Front.bind(Chain.bind(served), Limits(**served.limits).body, served.prefix_cache is not None)
