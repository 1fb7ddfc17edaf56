"""Parses the options of `snapcap bench`, and runs the measurement that they name."""

import argparse
import signal
from collections.abc import Sequence

from snapcap.benchmarks import contenders, figures, latency, modes, startup
from snapcap.benchmarks.harness.arguments import add_files, seconds, some_of
from snapcap.benchmarks.harness.workload import MODELS
from snapcap.service.config.reader import Parser, SettingsError
from snapcap.warmup.machine.installation import MachineError, resolve_device

_EXAMPLES = """\
examples:
  snapcap bench peers                                         this server beside its peers, the demo model
  snapcap bench peers --model blip-base --rounds 2            random weights in the shapes of a known model
  snapcap bench startup --cases aot,eager,floor --runs 3
  snapcap bench startup --model vit-b16-gpt2 --cases all --json startup.json
  snapcap bench latency --concurrency 1,4,16
  snapcap bench modes --cases full,regional --runs 3          ways and modes of torch.compile, beside eager
  snapcap bench report                                        write the figures of benchmarks/results into the pages

Peers are measured where they are installed. Times of a busy machine mean little: compare the ratios of one run.
"""
MEASURES = {"peers": contenders, "startup": startup, "latency": latency, "modes": modes}


def make_parser() -> argparse.ArgumentParser:
    parser = Parser(
        "snapcap bench",
        description="Measure this server beside its peers, on this machine.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
    )
    adder = parser.add_subparsers(dest="measure", metavar="WHAT", title="what", required=True)
    for name, module in MEASURES.items():
        text = (module.__doc__ or "").partition("\n")[0].removesuffix(".")
        measure = adder.add_parser(name, help=text, description=module.__doc__, allow_abbrev=False)
        measure.add_argument(
            "--model", choices=MODELS, default="demo", help="all models but demo have random weights in real shapes"
        )
        measure.add_argument("--device", choices=("auto", "cpu", "cuda"), default="auto")
        add_files(measure)
        text = f"all, or some of {', '.join(module.TITLES)} (default: %(default)s)"
        cases, default = some_of(module.TITLES), ",".join(module.DEFAULT)
        measure.add_argument("--cases", type=cases, default=default, metavar="CASE,…", help=text)
        text = "start no measurement that would end later, and print the results so far"
        measure.add_argument("--time-limit", type=seconds, default=float("inf"), metavar="SECONDS", help=text)
        module.add_arguments(measure)
    text = (figures.__doc__ or "").partition("\n")[0].removesuffix(".")
    adder.add_parser("report", help=text, description=figures.__doc__, allow_abbrev=False)
    return parser


def main(arguments: Sequence[str]) -> int:
    """Runs one measurement. The exit status is 0 if everything that can run here gave results.

    Raises:
        SettingsError: the command line is wrong, or needs something that is not installed.
    """
    options = make_parser().parse_args(arguments)
    try:
        if options.measure == "report":
            figures.write()
            return 0
        device = resolve_device(options.device).partition(":")[0]
        # Servers are stopped and results so far are shown, as after an interruption.
        signal.signal(signal.SIGTERM, signal.default_int_handler)
        status: int = MEASURES[options.measure].run(options, device)
    except (MachineError, figures.FiguresError) as error:
        raise SettingsError(str(error)) from error
    return status
