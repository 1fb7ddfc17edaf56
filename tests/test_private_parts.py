"""Holds what is used of other projects' private parts: it is as it was tried, and no untried version is let in.

A release that moves such a part fails here. Raise the upper bound in pyproject.toml when all tests have passed with
that release. What other tests hold: Inductor's list of vector instructions (warmup/build/test_environment.py), its
class that calls the compiler (warmup/build/test_interface.py), Dynamo's and Inductor's counters
(e2e/test_jit_start.py), the library names in a package (warmup/runtime/test_package_library.py).
"""

import asyncio
import ctypes
import hashlib
import inspect
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
import torch
import uvicorn
from packaging.requirements import Requirement
from packaging.version import Version
from uvicorn.protocols.http.flow_control import FlowControl
from uvicorn.protocols.http.httptools_impl import HttpToolsProtocol, RequestResponseCycle
from uvicorn.server import ServerState

from snapcap.service.http.protocol import BoundedHttpProtocol, Flow
from snapcap.service.server.http_process import Server
from snapcap.warmup.options import S3Options
from snapcap.warmup.runtime.aoti import native, native_cuda
from snapcap.warmup.s3.client import client

ROOT = Path(__file__).parent.parent
PRIVATE = ("torch", "uvicorn", "botocore")
OVERRIDDEN: dict[type, tuple[type, set[str]]] = {
    BoundedHttpProtocol: (
        HttpToolsProtocol,
        {
            *("connection_made", "connection_lost", "data_received", "_start_asgi_task"),
            *("on_message_begin", "on_url", "on_header", "on_headers_complete", "on_body", "on_message_complete"),
            "on_response_complete",
        },
    ),
    Flow: (FlowControl, {"resume_reading"}),
    Server: (uvicorn.Server, {"startup", "shutdown", "handle_exit", "on_tick"}),
}
# Of the declaration of at::cuda::CUDAGraph, without comments and spaces, by torch's version.
CUDA_GRAPH = {"2.13": "81a0fd48fa7fa9fe"}


def requirements() -> dict[str, Requirement]:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return {each.name: each for each in map(Requirement, project["dependencies"])}


def pinned() -> dict[str, Version]:
    """The versions that tests run with."""
    pins = re.findall(r"^([\w-]+)==(\S+)", (ROOT / "constraints.txt").read_text(), re.MULTILINE)
    return {name.replace("_", "-"): Version(version) for name, version in pins}


@pytest.mark.parametrize("package", PRIVATE)
def test_a_version_that_was_not_tried_is_not_installed(package: str) -> None:
    bounds, tried = requirements()[package].specifier, pinned()[package]
    assert bounds.contains(tried)
    assert not bounds.contains(f"{tried.major}.{tried.minor + 1}.0"), "private parts of it are used: bound it"


def test_the_versions_that_tests_run_with_are_within_the_bounds() -> None:
    found, tried = requirements(), pinned()
    assert found.keys() - tried == set()
    assert [name for name in found if tried[name] not in found[name].specifier] == []


@pytest.mark.parametrize("ours", OVERRIDDEN)
def test_uvicorns_methods_are_there_to_be_overridden(ours: type) -> None:
    """A method that uvicorn no longer has would never be called, and one that it has anew would be overridden."""
    theirs, names = OVERRIDDEN[ours]
    shared = {name for name in vars(ours) if hasattr(theirs, name) and not name.startswith("__")}
    assert shared == names
    for name in names:
        assert list(inspect.signature(getattr(ours, name)).parameters) == list(
            inspect.signature(getattr(theirs, name)).parameters
        ), name


def test_uvicorns_connections_have_the_fields_that_are_used() -> None:
    async def app(scope: Any, receive: Any, send: Any) -> None: ...

    async def begun() -> HttpToolsProtocol:
        protocol = HttpToolsProtocol(uvicorn.Config(app, log_config=None), ServerState(), {})
        protocol.on_message_begin()
        return protocol

    protocol = asyncio.run(begun())
    used = {
        *("app", "client", "cycle", "expect_100_continue", "flow", "headers", "loop", "parser", "pipeline"),
        *("scope", "server_state", "transport", "url"),
    }
    assert used - vars(protocol).keys() == set()
    assert "self._start_asgi_task(" in inspect.getsource(HttpToolsProtocol.on_headers_complete)
    used = {
        "body",
        "disconnected",
        "keep_alive",
        "message_event",
        "more_body",
        "response_complete",
        "response_started",
        "transport",
    }
    assert used - set(RequestResponseCycle.__init__.__code__.co_names) == set()
    called = re.findall(r"self\.transport\.(\w+)", inspect.getsource(RequestResponseCycle))
    assert {*called} == {"write", "is_closing", "close"}


def test_botocores_client_sends_by_the_session_that_is_used() -> None:
    from botocore.awsrequest import AWSResponse
    from botocore.httpsession import URLLib3Session

    made: Any = client(S3Options(endpoint_url="http://127.0.0.1:1", region="us-east-1"))
    session = made._endpoint.http_session
    assert isinstance(session, URLLib3Session)
    assert list(inspect.signature(session.send).parameters) == ["request"]
    assert list(inspect.signature(AWSResponse).parameters) == ["url", "status_code", "headers", "raw"]


def test_inductors_locks_are_of_the_class_that_is_replaced() -> None:
    """With `filelock`'s own class in its place, builds would fail where flock is denied."""
    folder = Path(torch.__file__).parent / "_inductor"
    locking = [each for each in folder.glob("*.py") if "FileLock(" in each.read_text(encoding="utf-8")]
    assert {"cache.py", "codecache.py", "cpp_builder.py"} <= {each.name for each in locking}
    for each in locking:
        imports = re.findall(r"from (\S+) import FileLock", each.read_text(encoding="utf-8"))
        assert {*imports} == {"torch.utils._filelock"} or each.name == "debug.py", each.name


def mangled(module: Any) -> set[str]:
    """C++ functions that a module calls by their names in the library."""
    return {value for value in vars(module).values() if isinstance(value, str) and value.startswith("_ZN")} - {
        "_ZN2at4cuda9CUDAGraph"  # the beginning of others
    }


def exported(library: str, names: set[str]) -> set[str]:
    functions = ctypes.CDLL(str(Path(torch.__file__).parent / "lib" / library))
    return {name for name in names if hasattr(functions, name)}


def test_libtorch_has_the_functions_that_are_called() -> None:
    names = mangled(native) | native._SIGNATURES.keys() | {"aoti_torch_empty_strided"}
    assert mangled(native)
    assert names - exported("libtorch_cpu.so", names) == set()


@pytest.mark.skipif(
    torch.version.cuda is None, reason="THIS TORCH IS BUILT WITHOUT CUDA: ITS GRAPHS ARE NOT LOOKED FOR"
)
def test_libtorch_has_the_functions_of_cuda_graphs() -> None:
    names = mangled(native_cuda) | native_cuda._SIGNATURES.keys() | native_cuda._WAITING.keys()
    names |= {"aoti_torch_create_cuda_stream_guard", "aoti_torch_delete_cuda_stream_guard"}
    assert len(mangled(native_cuda)) == 10
    assert names - exported("libtorch_cuda.so", names) == set()


def test_a_cuda_graph_is_declared_as_it_was_tried() -> None:
    """It is made in a buffer: look at what its members take together, and at the arguments of its constructor."""
    version = ".".join(torch.__version__.split(".")[:2])
    header = Path(torch.__file__).parent / "include" / "ATen" / "cuda" / "CUDAGraph.h"
    found = re.search(r"struct TORCH_CUDA_CPP_API CUDAGraph \{.*?\n\};", header.read_text(), re.DOTALL)
    assert found is not None
    declaration = "".join(re.sub(r"//.*", "", found[0]).split())
    assert hashlib.sha256(declaration.encode()).hexdigest()[:16] == CUDA_GRAPH.get(version), version
