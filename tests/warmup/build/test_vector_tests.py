"""Host code for a GPU is compiled without asking which vector instructions the CPU has."""

from collections.abc import Iterator

import pytest
from torch._inductor import cpu_vec_isa

from snapcap.warmup.build.environment import skip_vector_tests


@pytest.fixture
def tested(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """The instruction sets that Inductor compiles a test program for; every one passes."""
    seen: list[str] = []

    def check_build(isa: cpu_vec_isa.VecISA, _code: str) -> bool:
        seen.append(str(isa))
        return True

    fresh = [type(isa)() for isa in cpu_vec_isa.supported_vec_isa_list]
    monkeypatch.setattr(cpu_vec_isa, "supported_vec_isa_list", fresh)
    monkeypatch.setattr(cpu_vec_isa.VecISA, "check_build", check_build)
    monkeypatch.setattr(cpu_vec_isa, "x86_isa_checker", lambda: ["avx2"])
    monkeypatch.setattr("platform.machine", lambda: "x86_64")
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()
    yield seen
    cpu_vec_isa.valid_vec_isa_list.cache_clear()
    cpu_vec_isa.VecISA._VecISA__bool__impl.cache_clear()


def test_no_test_program_is_compiled_for_a_gpu(tested: list[str]) -> None:
    skip_vector_tests("cuda")
    assert cpu_vec_isa.pick_vec_isa() is cpu_vec_isa.invalid_vec_isa
    assert tested == []


def test_for_a_cpu_inductor_looks_as_it_does_by_itself(tested: list[str]) -> None:
    skip_vector_tests("cpu")
    assert str(cpu_vec_isa.pick_vec_isa()) == "avx2"
    assert tested == ["avx2"]
