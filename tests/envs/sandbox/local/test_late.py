"""An engine that was stopped creates what it was asked for long ago: after the sandbox was given up."""

from __future__ import annotations

import pytest

from envs.sandbox.api import Spec
from envs.sandbox.engines.fake import FakeBackend, FakeContainers
from envs.sandbox.local.sandbox import LocalSandbox
from flash.errors import SandboxTimeoutError

pytestmark = pytest.mark.anyio


class LateContainers(FakeContainers):
    """Answers no creation in time, and carries it out after the first removal."""

    def __init__(self, backend: FakeBackend) -> None:
        super().__init__(backend.folder, backend.images, backend.faults)
        self.late: list = []

    async def create(self, spec, *, name, labels) -> str:
        self.late.append((spec, name, labels))
        raise SandboxTimeoutError("the engine did not answer in time")

    async def delete(self, container_id) -> None:
        await super().delete(container_id)
        while self.late:
            spec, name, labels = self.late.pop()
            await super().create(spec, name=name, labels=labels)


async def test_a_container_that_comes_after_its_removal_is_removed_too():
    async with FakeBackend() as backend:
        backend.containers = late = LateContainers(backend)
        with pytest.raises(SandboxTimeoutError):
            async with LocalSandbox(backend, Spec(image="any")):
                raise AssertionError
        assert not late.late
        assert not backend.containers.kept
