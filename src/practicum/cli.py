"""The command line: `practicum demo | train | serve | merge | router | routes | explain`.

Heavy imports wait until needed.
"""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from practicum import routes_cli
from practicum.errors import ConfigError
from practicum.messages import Debug, errors_as_messages

if TYPE_CHECKING:
    from practicum.config import Config

app = typer.Typer(
    add_completion=False,
    no_args_is_help=True,
    help="Reinforcement-learning post-training for language models, from a laptop to a Ray cluster.",
    pretty_exceptions_enable=False,
)
app.add_typer(routes_cli.app, name="routes")

ConfigFile = Annotated[Path, typer.Argument(help="A YAML config.", metavar="CONFIG")]
Overrides = Annotated[
    list[str] | None, typer.Argument(help="Overrides such as actor.lr=5e-7.", metavar="[KEY=VALUE]...")
]


@app.command()
def demo(
    overrides: Overrides = None,
    folder: Annotated[Path, typer.Option(help="Where the demo puts its files.")] = Path("runs/demo"),
    debug: Debug = False,
) -> None:
    """Two minutes, no GPU: a tiny mixture-of-experts model learns to add."""
    with errors_as_messages(debug):
        from rich.console import Console

        from practicum.demo.run import prepare
        from practicum.loop.progress import PLAIN

        console = Console()
        with console.status("making a tiny model and warming it up on worked sums") as status:

            def on_step(step: int, accuracy: float) -> None:
                status.update(f"supervised warm-up: step {step}, accuracy {accuracy:.2f}")

            config = prepare(folder, overrides or [], on_step)
        console.print(
            f"A tiny Qwen3-MoE, warmed up on worked sums (40 % of them wrong), is in {config.model.path}. "
            "Now it learns (GRPO).",
            **PLAIN,
        )
        _run(config, console, title="Practicum demo: a tiny mixture of experts learns to add")


@app.command()
def train(config_file: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Train a model as the config says. `resume=auto` continues a run where it stopped."""
    with errors_as_messages(debug):
        from rich.console import Console

        from practicum.config import Config

        config = Config.load(config_file, overrides or [])
        _run(config, Console(), title=f"Practicum: {config.trainer.run_dir}")


@app.command()
def explain(config_file: ConfigFile, overrides: Overrides = None, debug: Debug = False) -> None:
    """Print the resolved config, the placement, the batch algebra and a memory estimate. Starts nothing."""
    with errors_as_messages(debug):
        from practicum.config import Config
        from practicum.loop.explain import explanation

        typer.echo(explanation(Config.load(config_file, overrides or [])))


@app.command()
def router(
    worker: Annotated[list[str] | None, typer.Option(help="A worker's URL; once for each.", metavar="URL")] = None,
    policy: Annotated[
        str, typer.Option(help="Which worker gets a request: expected_finish, least_requests, round_robin, …")
    ] = "expected_finish",
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(help="The port to listen at; 0 takes a free one.")] = 8000,
    admin_port: Annotated[int | None, typer.Option(help="A port of its own for the control plane.")] = None,
    token: Annotated[
        str | None, typer.Option(envvar="PRACTICUM_ROUTER_TOKEN", help="Bearer token of the control plane.")
    ] = None,
    max_in_flight: Annotated[int, typer.Option(help="Requests a worker may have at a time.")] = 256,
    response_timeout: Annotated[float, typer.Option(help="Seconds a worker may be silent.")] = 600.0,
    hedge_quantile: Annotated[
        float | None, typer.Option(help="Ask a second worker when one takes longer than this share of requests.")
    ] = None,
    set_: Annotated[
        list[str] | None, typer.Option("--set", help="Any other setting of a router.", metavar="NAME=VALUE")
    ] = None,
    debug: Debug = False,
) -> None:
    """One HTTP address in front of many workers. A signal stops it after the requests under way."""
    with errors_as_messages(debug, interrupted="stopped."):
        from practicum.reward.router import Router
        from practicum.reward.router.settings import parse_settings

        settings: dict[str, Any] = {
            "workers": worker or (),
            "policy": policy,
            "host": host,
            "port": port,
            "admin_port": admin_port,
            "token": token,
            "max_in_flight": max_in_flight,
            "response_timeout_s": response_timeout,
            "hedge_quantile": hedge_quantile,
        }
        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        chosen = Router(**(settings | parse_settings(set_ or [])))
        chosen.run(lambda server: typer.echo(f"router ready at {server.url}"))


@app.command()
def serve(
    model: Annotated[str, typer.Argument(help="A model folder or a hub name.", metavar="MODEL")],
    engine: Annotated[
        str | None, typer.Option(help="The engine, as in rollout.engine. A classifier needs none.")
    ] = None,
    host: Annotated[str, typer.Option(help="The address to listen at; 0.0.0.0 for all.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="The port to listen at; 0 takes a free one.")] = 8000,
    device: Annotated[str, typer.Option(help="auto, cpu or cuda.")] = "auto",
    dtype: Annotated[str, typer.Option(help="What it computes in: float32 or bfloat16.")] = "float32",
    max_batch: Annotated[int, typer.Option(help="Answers that are written at a time.")] = 256,
    token_env: Annotated[
        str | None, typer.Option(help="The environment variable with the bearer token that callers must send.")
    ] = None,
    debug: Debug = False,
) -> None:
    """A model behind HTTP, as OpenAI's clients ask it. Stops by finishing what it has begun."""
    with errors_as_messages(debug, interrupted="stopped."):
        token = _token_from(token_env)
        from practicum.config import RolloutConfig
        from practicum.rollout.server import serve as serve_model
        from practicum.rollout.server import service_of

        logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
        if token is None and host not in ("127.0.0.1", "::1", "localhost"):
            logging.warning("without --token-env whoever reaches %s may ask, and load other weights", host)
        chosen = engine or RolloutConfig().engine
        service = service_of(model, engine=chosen, device=device, dtype=dtype, max_batch=max_batch)
        ready = f"{model} ready at "
        asyncio.run(serve_model(service, lambda url: typer.echo(ready + url), host=host, port=port, token=token))


@app.command()
def merge(
    adapters: Annotated[str, typer.Argument(help="A folder with adapters, as of a checkpoint.", metavar="ADAPTERS")],
    folder: Annotated[Path, typer.Argument(help="Where the whole model is put.", metavar="FOLDER")],
    dtype: Annotated[str, typer.Option(help="What its weights are saved in: float32 or bfloat16.")] = "float32",
    debug: Debug = False,
) -> None:
    """Write the whole model that adapters and the model they belong to make together."""
    with errors_as_messages(debug):
        from practicum.models import DTYPES, save_merged

        if dtype not in DTYPES:
            raise ConfigError(f"unknown dtype {dtype!r}: the dtypes are {', '.join(DTYPES)}.")
        save_merged(adapters, folder, DTYPES[dtype])
        typer.echo(f"{folder} holds the whole model.")


def _token_from(variable: str | None) -> str | None:
    if variable is None:
        return None
    token = os.environ.get(variable, "")
    if not token:
        raise ConfigError(f"--token-env={variable}, but there is nothing in that environment variable.")
    return token


def _run(config: Config, console: Any, title: str) -> None:
    from practicum.loop.progress import PLAIN, Progress, print_ending
    from practicum.loop.report import write_report
    from practicum.loop.summary import write_summary
    from practicum.loop.trainer import Trainer

    trainer = Trainer(config, notify=lambda text: console.print(text, **PLAIN))
    with Progress(console) as progress:
        for step in trainer.steps():
            progress.show(step)
    run_dir = Path(config.trainer.run_dir)
    summary = write_summary(run_dir)
    report = write_report(run_dir, summary, title)
    print_ending(console, run_dir, summary, report)


def main() -> None:
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")  # forked after use, it would warn and may deadlock
    app()
