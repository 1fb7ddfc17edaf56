"""Skips Inductor's test programs for a CPU's vector instructions where no CPU code of weight is compiled."""


def skip_vector_tests(device_type: str) -> None:
    """Compile host code for a GPU without vector instructions, once torch._inductor is imported.

    Before its first package a process compiles and loads up to four test programs, behind a lock that all processes
    share: 16 builders waited 60 to 130 s for each other (benchmarks/NOTES.md). On CUDA host code only launches
    kernels. TORCHINDUCTOR_VEC_ISA_OK does not help: the tests for AVX512-BF16, VNNI and AMX do not ask it.
    """
    if device_type == "cuda":
        from torch._inductor import cpu_vec_isa  # noqa: PLC0415  the compiler, which no other start imports

        cpu_vec_isa.supported_vec_isa_list.clear()
