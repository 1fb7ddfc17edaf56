"""Maps the compile modes of a component to the Inductor options they stand for. No torch."""

MODES = ("default", "max-autotune")

Option = str | int | bool


def inductor_options(mode: str, device_type: str) -> dict[str, Option]:
    """Options for ``torch._inductor`` by their dotted names; the same for aot and jit.

    ``max-autotune`` benchmarks GEMM templates against the libraries' kernels. On cuda, kernels are embedded in the
    package, so that a server starts no compiler and needs no cache folder.
    """
    options: dict[str, Option] = {}
    if mode == "max-autotune":
        options["max_autotune"] = True
    if device_type == "cuda":
        options["aot_inductor.embed_kernel_binary"] = True
        # All that a C++ compiler makes here is the code that launches kernels, and a graph replaces that. Its time
        # goes into reading headers, and a precompiled one would be made by every builder at once.
        options["aot_inductor.compile_wrapper_opt_level"] = "O0"
        options["aot_inductor.precompile_headers"] = False
    return options
