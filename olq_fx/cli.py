"""The command `olq-fx`.

    main(arguments) -> int      run one command line; returns the exit code, and never raises
    entry()                     what the console script calls

Results go to the standard output, as text or (`--json`) as strict JSON; warnings, errors and progress go to the error
stream. An error is one paragraph there; with `--json` it is an object on the standard output as well.
"""

import contextlib
import functools
import os
import sys
import traceback
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

import click

import olq_fx
from olq_fx import cli_tables
from olq_fx.cli_answers import DONE, EXIT_CODES, INTERRUPTED, USAGE, Answer, code_of, paragraph, say, say_json
from olq_fx.cli_options import ConfiguredCommand, config_of, configured, is_configured

F = TypeVar("F", bound=Callable[..., Any])

_CODES = "\b\nExit codes:\n" + "\n".join(f"  {code:<4}{meaning}" for code, meaning in EXIT_CODES.items())
_MODEL = (
    "MODEL is a local folder in Hugging Face's layout, or module:callable, a function that returns a torch.nn.Module."
)


@click.group(epilog=_CODES, context_settings={"help_option_names": ["-h", "--help"]}, no_args_is_help=False)
@click.version_option(olq_fx.__version__, prog_name="olq-fx")
def cli() -> None:
    """Online quantization of any PyTorch model."""


def _answering(function: Callable[..., Answer]) -> Callable[..., Answer]:
    """Add the options that all commands have; what a model prints meanwhile goes to the error stream."""

    @functools.wraps(function)
    def command(*args: Any, as_json: bool, show_traceback: bool, **options: Any) -> Answer:
        with contextlib.redirect_stdout(sys.stderr):
            return function(*args, **options)

    for option in (
        click.option("--traceback", "show_traceback", is_flag=True, help="Show the Python traceback of an error too."),
        click.option("--json", "as_json", is_flag=True, help="Print strict JSON."),
    ):
        command = option(command)
    return command


def _options(*options: Callable[[F], F]) -> Callable[[F], F]:
    """Several options, in their order."""

    def add(function: F) -> F:
        for option in reversed(options):
            function = option(function)
        return function

    return add


_model = click.argument("model")
_dtype = click.option(
    "--dtype",
    type=click.Choice(["auto", "float32", "float16", "bfloat16"]),
    default="auto",
    show_default=True,
    help="Original precision; auto is that of the checkpoint.",
)
_device = click.option("--device", metavar="NAME", help="Where the model runs, such as cuda; by default the CPU.")
_seed = click.option("--seed", type=click.IntRange(0, 2**63 - 1), default=0, show_default=True)


@cli.command()
@_answering
def schemes() -> Answer:
    """List the schemes."""
    return cli_tables.schemes()


@cli.command()
@_answering
def formats() -> Answer:
    """List the formats."""
    return cli_tables.formats()


@cli.command()
@_answering
def pairs() -> Answer:
    """List which weight formats go with which activation formats."""
    return cli_tables.format_pairs()


@cli.command(cls=ConfiguredCommand, epilog=_MODEL)
@_model
@configured
@_options(
    click.option(
        "--inputs", metavar="MODULE:CALLABLE", help="Gives the arguments of a call, to find weights in functions."
    ),
    _dtype,
    click.option(
        "--device",
        type=click.Choice(["cpu", "cuda"]),
        default="cpu",
        show_default=True,
        help="Whose kernels to predict; it need not be there.",
    ),
    click.option("--against", metavar="NAME|JSON|FILE", help="Show what becomes otherwise than by this configuration."),
    click.option("--meta/--no-meta", default=True, help="Build the model without memory (the default) or with it."),
)
@_answering
@click.pass_context
def plan(ctx: click.Context, /, model: str, dtype: str, strict: bool, **options: Any) -> Answer:
    """Show what a configuration will do with every weight of MODEL. No weights are read."""
    from olq_fx import cli_models, cli_plan

    wanted = {name: options[name] for name in ("inputs", "meta", "device")}
    if options["against"] is not None:
        wanted["against"] = olq_fx.QuantizationConfig.parse(options["against"])
    return cli_plan.plan(model, config_of(ctx), strict=strict, dtype=cli_models.dtype_of(dtype), **wanted)


@cli.command(cls=ConfiguredCommand, epilog=_MODEL)
@_model
@configured
@_options(
    click.option("--inputs", metavar="MODULE:CALLABLE", help="Gives one call, or a list of calls, to run both on."),
    click.option("--text", metavar="FILE", help="A text, or a JSON list of texts, to run on and measure perplexity."),
    click.option("--tokens", type=click.IntRange(2), default=2048, show_default=True, help="Length of the text."),
    click.option("--window", type=click.IntRange(2), default=128, show_default=True, help="Tokens of a sequence."),
    click.option("--batch", type=click.IntRange(1), default=4, show_default=True, help="Sequences of a call."),
    click.option("--loop", metavar="MODULE:CALLABLE", help="Yields what each step of loop(model, call) made."),
    click.option("--trace", is_flag=True, help="Quantize weights that are used by functions too, by tracing a call."),
    _seed,
    click.option("--fail-under", metavar="BOUNDS", help="Exit with 1 below these, e.g. psnr_db=20,cosine=0.98."),
    click.option("--fail-over", metavar="BOUNDS", help="Exit with 1 above these, e.g. kl=0.01,perplexity_ratio=1.05."),
    click.option("--suggest-ignore", is_flag=True, help="Search the cheapest `ignore` list that meets the bounds."),
    click.option("--layers/--no-layers", default=True, help="Compare every quantized layer too (the default)."),
    click.option(
        "--repeat", type=click.IntRange(0), default=3, show_default=True, help="Timed calls; 0: measure no cost."
    ),
    click.option("--compiled", is_flag=True, help="Measure the time of both through torch.compile."),
    click.option("--plot", metavar="FILE.png", help="Draw the error by layer."),
    click.option("--metric", default="relative_l2", show_default=True, help="The error to draw."),
    _dtype,
    _device,
)
@_answering
@click.pass_context
def compare(ctx: click.Context, /, model: str, **options: Any) -> Answer:
    """Compare MODEL with what a configuration makes of it, on the same inputs and seeds."""
    from olq_fx import cli_compare, cli_inputs, cli_models

    own = (
        "loop",
        "trace",
        "fail_under",
        "fail_over",
        "suggest_ignore",
        "layers",
        "repeat",
        "compiled",
        "plot",
        "metric",
    )
    given = {name: options[name] for name in (*own, "strict")}
    read = {name: options[name] for name in ("inputs", "text", "tokens", "window", "batch", "seed")}
    config = config_of(ctx)
    found = cli_compare.CompareOptions(
        inputs=cli_inputs.InputOptions(**read),
        progress=True,
        dtype=cli_models.dtype_of(options["dtype"]),
        device=cli_models.device_of(options["device"]),
        **given,
    )
    return cli_compare.compare_model(model, config, found)


@cli.command(cls=ConfiguredCommand, epilog=_MODEL)
@_model
@configured
@_options(
    click.option(
        "--prompt", "prompts", multiple=True, required=True, help="What to go on from; may be given several times."
    ),
    click.option("--max-new-tokens", type=click.IntRange(1), default=32, show_default=True),
    click.option(
        "--temperature", type=click.FloatRange(0), default=0.0, show_default=True, help="0: the likeliest token."
    ),
    _seed,
    _dtype,
    _device,
)
@_answering
@click.pass_context
def run(ctx: click.Context, /, model: str, **options: Any) -> Answer:
    """Load MODEL, quantize it, and generate text.

    All of MODEL is loaded in its original precision before it is quantized: that is the peak of memory.
    """
    from olq_fx import cli_models, cli_run

    given = {name: options[name] for name in ("prompts", "max_new_tokens", "temperature", "seed", "strict")}
    config = config_of(ctx)
    found = cli_run.RunOptions(
        progress=True,
        dtype=cli_models.dtype_of(options["dtype"]),
        device=cli_models.device_of(options["device"]),
        **given,
    )
    return cli_run.run(model, config, found)


@cli.command(cls=ConfiguredCommand)
@_model
@click.argument("out")
@configured
@_options(
    click.option(
        "--max-shard-size", default="1GB", show_default=True, metavar="SIZE", help="Bytes of a file of tensors."
    ),
    _dtype,
    click.option("--device", metavar="NAME", help="Where weights are converted, such as cuda; by default the CPU."),
)
@_answering
@click.pass_context
def quantize(ctx: click.Context, /, model: str, out: str, **options: Any) -> Answer:
    """Convert the checkpoint of MODEL, and write it to the new folder OUT.

    MODEL is a local folder in Hugging Face's layout. Memory holds one file of the result and one weight. OUT is there
    as a whole or not at all; a run that was interrupted goes on when the same command is given again. OUT may be a
    model that was saved before: it is replaced.
    """
    from olq_fx import cli_models, cli_quantize

    config = config_of(ctx)
    found = cli_quantize.QuantizeOptions(
        progress=True,
        dtype=cli_models.dtype_of(options["dtype"]),
        device=cli_models.device_of(options["device"]),
        **{name: options[name] for name in ("max_shard_size", "strict")},
    )
    return cli_quantize.quantize(model, out, config, found)


@cli.command(cls=ConfiguredCommand, epilog=_MODEL)
@click.argument("model", required=False)
@configured
@_options(
    click.option(
        "--arch",
        default="sm_90",
        show_default=True,
        metavar="NAME",
        help="sm_80, sm_89, sm_90, sm_100, sm_120, or a device: a100, l40s, rtx4090, h100, h200, b200, rtx5090.",
    ),
    click.option("--m", "rows", default="1,64,4096", show_default=True, metavar="M,...", help="Rows of activations."),
    click.option("--fused", is_flag=True, help="Activations arrive as codes: their quantization costs nothing here."),
    click.option(
        "--emitted", is_flag=True, help="Instead, compile MODEL for --arch with Inductor and show the kernels it emits."
    ),
    click.option(
        "--code/--no-code",
        default=None,
        help="Alone: compile the kernels of the library for --arch and show their machine code. "
        "With --emitted: whether to do so with the emitted ones (the default).",
    ),
    click.option("--format", "formats", multiple=True, metavar="NAME", help="With --code: the kernels of this format."),
    click.option("--inputs", metavar="MODULE:CALLABLE", help="With --emitted: gives the arguments of a call."),
    click.option(
        "--tokens", metavar="BxS", help="With --emitted: sequences x tokens for a language model, by default 1x128."
    ),
    click.option("--blocks", type=click.IntRange(1), help="With --emitted: build only so many of the repeated blocks."),
    click.option("--dump", metavar="DIR", help="With --emitted: write sources and graphs into this new folder."),
    _dtype,
    click.option("--meta/--no-meta", default=True, help="Build the model without memory (the default) or with it."),
)
@_answering
@click.pass_context
def kernels(ctx: click.Context, /, model: str | None, arch: str, **options: Any) -> Answer:
    """Show what the layers of MODEL cost at best on a GPU, or what the kernels become there. No GPU is needed.

    Without a configuration every scheme is compared. With --emitted MODEL is compiled as it is (in bfloat16 if --dtype
    says nothing else) and quantized.
    """
    from olq_fx import cli_kernel_code, cli_kernels, cli_models
    from olq_fx.cost_model import architecture

    _check_kernels(ctx, model, options)
    if options["emitted"]:
        return _emitted_kernels(ctx, str(model), architecture(arch), options)
    if options["code"]:
        return cli_kernel_code.code(options["formats"], architecture(arch))
    return cli_kernels.kernels(
        str(model),
        config_of(ctx) if is_configured(ctx) else None,
        architecture=architecture(arch),
        rows=cli_kernels.rows_from(options["rows"]),
        dtype=cli_models.dtype_of(options["dtype"]),
        **{name: options[name] for name in ("fused", "strict", "meta")},
    )


@cli.command(cls=ConfiguredCommand, epilog=_MODEL)
@click.argument("model", required=False)
@configured
@_options(
    click.option("--scheme", metavar="NAME", help="The same as --quantization NAME."),
    click.option(
        "--shape", "shapes", metavar="MxNxK", multiple=True, help="Instead of MODEL: a product; may be given again."
    ),
    click.option(
        "--kernel",
        "family",
        type=click.Choice(["product", "chain", "grouped"]),
        default="product",
        show_default=True,
        help="Of --shape: a plain product; SiLU x up of one, quantized (N: rows of gate and up); one of experts.",
    ),
    click.option("--experts", type=click.IntRange(0), default=0, help="With --kernel grouped: how many there are."),
    click.option("--m", "rows", metavar="M,...", help="Of MODEL: rows of activations.  [default: 1,64,4096]"),
    click.option("--arch", default="sm_90", show_default=True, metavar="NAME", help="As for `olq-fx kernels`."),
    click.option("--out", metavar="FILE.json", default="", help="Where the table goes; without it, it is only shown."),
    click.option("--candidates", type=click.IntRange(1), default=24, show_default=True, help="Tried of each product."),
    click.option("--jobs", type=click.IntRange(1), default=2, show_default=True, help="Compilers at work at once."),
    click.option("--rounds", type=click.IntRange(1), default=20, show_default=True, help="How often each is timed."),
    click.option("--measure/--no-measure", default=True, help="Time them where such a GPU is here (the default)."),
    _dtype,
)
@_answering
@click.pass_context
def tune(ctx: click.Context, /, model: str | None, shapes: tuple[str, ...], **options: Any) -> Answer:
    """Find the best tiles for the products of MODEL, or of given shapes, and write them as a table.

    Every candidate is compiled for --arch; those that can be used are timed where that GPU is here, else ranked by
    estimate. `olq_fx.use_tuned` follows the table.
    """
    from olq_fx import cli_kernels, cli_models, cli_tune
    from olq_fx.cost_model import architecture

    if (model is None) == (not shapes):
        raise click.UsageError("Give either MODEL or --shape.")
    if model is not None and (options["family"] != "product" or options["experts"]):
        raise click.UsageError("--kernel and --experts go with --shape.")
    if shapes and options["rows"] is not None:
        raise click.UsageError("--m goes with MODEL; M is the first number of --shape.")
    if options["scheme"] is not None:
        ctx.params["schemes"] = (*ctx.params["schemes"], options["scheme"])
    config, dtype = config_of(ctx), cli_models.dtype_of(options["dtype"])
    found = cli_tune.TuneOptions(
        architecture=architecture(options["arch"]),
        **{name: options[name] for name in ("out", "candidates", "jobs", "rounds", "measure")},
    )
    cli_tune.check_family(options["family"], options["experts"])
    cli_tune.check_out(options["out"])
    if model is None:
        problems = cli_tune.of_shapes(shapes, config, dtype, options["family"], options["experts"])
    else:
        rows = cli_kernels.rows_from(options["rows"] or "1,64,4096")
        problems = cli_tune.of_model(model, config, rows, dtype, options["strict"])
    return cli_tune.tune(problems, found)


def _check_kernels(ctx: click.Context, model: str | None, options: Mapping[str, Any]) -> None:
    """Refuse options of `kernels` that do not go together."""
    if options["emitted"]:
        wrong = [name for name in ("rows", "fused", "formats") if _is_given(ctx, name)]
        if wrong:
            raise click.UsageError(f"--emitted does not go with {', '.join(map(_FLAGS.__getitem__, wrong))}.")
    else:
        wrong = [name for name in ("inputs", "tokens", "blocks", "dump") if _is_given(ctx, name)]
        if wrong or options["code"] is False:
            raise click.UsageError(f"{', '.join(f'--{name}' for name in wrong) or '--no-code'} goes with --emitted.")
    if options["code"] and not options["emitted"]:
        if model is not None or is_configured(ctx):
            raise click.UsageError("--code shows the kernels of the library: it takes no MODEL and no configuration.")
    elif model is None:
        raise click.UsageError("Missing argument 'MODEL'.")
    elif options["formats"]:
        raise click.UsageError("--format goes with --code.")


_FLAGS = {"rows": "--m", "fused": "--fused", "formats": "--format"}


def _is_given(ctx: click.Context, name: str) -> bool:
    return ctx.get_parameter_source(name) is not click.core.ParameterSource.DEFAULT


def _emitted_kernels(ctx: click.Context, model: str, architecture: Any, options: Mapping[str, Any]) -> Answer:
    from olq_fx import cli_emitted, cli_inputs, cli_models

    found = cli_emitted.EmittedOptions(
        tokens=cli_inputs.shape_from("1x128" if options["tokens"] is None else options["tokens"]),
        dtype=cli_models.DTYPES["bfloat16" if options["dtype"] == "auto" else options["dtype"]],
        code=options["code"] is not False,
        **{name: options[name] for name in ("inputs", "blocks", "strict", "meta", "dump")},
    )
    return cli_emitted.kernels(model, config_of(ctx), architecture, found)


def main(arguments: Sequence[str]) -> int:
    """Run one command line.

    Returns:
        The exit code, see `olq-fx --help`.
    """
    flags = [word for word in arguments if word in ("--", "--json", "--traceback")]
    flags = flags[: flags.index("--")] if "--" in flags else flags
    with warnings.catch_warnings():
        warnings.simplefilter("always", olq_fx.OlqFxWarning)
        warnings.showwarning = _warn
        try:
            result = cli.main(args=list(arguments), prog_name="olq-fx", standalone_mode=False)
        except click.exceptions.Exit as error:
            return error.exit_code
        except click.ClickException as error:
            return _fail(error, USAGE, _usage(error), flags)
        except (KeyboardInterrupt, click.Abort) as error:
            return _fail(error, INTERRUPTED, "interrupted", flags)
        except Exception as error:
            return _fail(error, code_of(error), paragraph(error), flags)
    if not isinstance(result, Answer):  # click has printed a help or a version
        return DONE
    if "--json" in flags:
        say_json(result.data)
    else:
        say(result.text)
    return result.code


def _usage(error: click.ClickException) -> str:
    """What is wrong with a command line, and where its options are listed."""
    message = " ".join(error.format_message().split())
    context = getattr(error, "ctx", None)
    return message if context is None else f"{message} `{context.command_path} --help` lists what there is."


def _fail(error: BaseException, code: int, message: str, flags: Sequence[str]) -> int:
    """Say what went wrong."""
    if "--traceback" in flags:
        say("".join(traceback.format_exception(error)), sys.stderr)
    say(f"olq-fx: error: {message}", sys.stderr)
    if "--json" in flags:
        say_json({"error": {"type": type(error).__name__, "message": message, "exit_code": code}})
    return code


def _warn(message: Warning | str, category: type[Warning], *_: Any, **__: Any) -> None:
    """Ours as a line; those of others are not for the user of a command."""
    if issubclass(category, olq_fx.OlqFxWarning):
        say(f"olq-fx: warning: {' '.join(str(message).split())}", sys.stderr)


def entry() -> None:
    """Run the command line of this process, offline."""
    for name, value in {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1"}.items():
        os.environ.setdefault(name, value)
    try:
        code = main(sys.argv[1:])
    except BrokenPipeError:
        # Whoever read the output has gone; nothing may be flushed into the void at exit either.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = DONE
    sys.exit(code)


if __name__ == "__main__":
    entry()
