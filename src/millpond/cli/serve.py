"""`millpond serve`: the server for other languages and for operators."""

import asyncio
import functools
from typing import Annotated, Any

import typer

from millpond.cli import run_arguments
from millpond.cli.app import add_options, app, connect_to, required_url
from millpond.cli.run_options import shard_names
from millpond.errors import MissingDriver
from millpond.seam.transport import Transport
from millpond.signals import stop_on_signals


async def serve(
    transport: Transport,
    host: Annotated[str, typer.Option(help="Address to bind; beyond loopback tokens are needed.")] = "127.0.0.1",
    port: Annotated[int, typer.Option(min=0, max=65535, help="Port of HTTP; 0: a free one.")] = 8420,
    grpc_port: Annotated[
        int | None, typer.Option(min=0, max=65535, help="Port of gRPC; 0: a free one; default: no gRPC.")
    ] = None,
    tls_cert: Annotated[str | None, typer.Option(metavar="FILE", help="Certificate chain, PEM.")] = None,
    tls_key: Annotated[str | None, typer.Option(metavar="FILE", help="Private key, PEM.")] = None,
    mask: Annotated[
        list[str] | None,
        typer.Option(metavar="ROLE:QUEUE", help="Hide bodies of these queues from a role; may be repeated."),
    ] = None,
    lake: Annotated[
        str | None,
        typer.Option("--lake", metavar="PATH", help="Lake whose days the history shows; folder or s3:// URL."),
    ] = None,
    root_path: Annotated[
        str, typer.Option(metavar="PATH", help="Prefix that a proxy removes from paths, such as /queue.")
    ] = "",
    proxies: Annotated[
        str | None,
        typer.Option(metavar="ADDRESSES", help="Proxies whose X-Forwarded headers count, with commas between."),
    ] = None,
    body_limit: Annotated[int, typer.Option(min=1024, help="Bytes of a request.")] = 8 * 1024 * 1024,
    rate: Annotated[float, typer.Option(min=1, help="Requests per second of one token.")] = 5000.0,
    connections: Annotated[int, typer.Option(min=1, help="Requests and streams at one time.")] = 2000,
) -> None:
    """Serve the dashboard, and HTTP and gRPC for other programs."""
    try:
        from millpond.server.run_server import RunningServer, run
        from millpond.server.settings import Limits, ServerSettings, parse_masks, parse_root_path
    except ModuleNotFoundError as e:
        if (e.name or "").startswith("millpond"):
            raise
        raise MissingDriver(
            f'millpond serve needs the package {e.name}; install it with: pip install "millpond[server]"'
        ) from e
    settings = ServerSettings(
        host=host,
        port=port,
        grpc_port=grpc_port,
        limits=Limits(body=body_limit, rate=rate, connections=connections),
        mask=parse_masks(mask or []),
        lake=None if lake is None else _counted(lake),
        tls_cert=tls_cert,
        tls_key=tls_key,
        root_path=parse_root_path(root_path),
        proxies=proxies,
    )

    def started(running: RunningServer) -> None:
        print(f"serving {running.url}/api/v1", flush=True)
        if running.grpc_address is not None:
            print(f"serving grpc://{running.grpc_address}", flush=True)
        print(f"the dashboard is at {running.url}/dashboard", flush=True)

    stopped = asyncio.Event()
    with stop_on_signals(stopped.set, replace=True):
        await run(transport, settings, started, stopped)


def _counted(lake: str) -> Any:
    from millpond.spark.lake.days import CountedLake  # imported here: it needs more packages

    return CountedLake(lake)


@functools.wraps(serve)
def _command(
    *,
    url: str | None,
    schema: str | None,
    table_prefix: str,
    option: list[str] | None,
    shards: str | None,
    key_range: str | None,
    **given: Any,
) -> None:
    async def work() -> None:
        chosen = shard_names(shards, key_range)
        async with connect_to(required_url(url), schema, table_prefix, option, shards=chosen) as transport:
            await serve(transport, **given)

    asyncio.run(work())


add_options(_command, serve, ("shards", run_arguments.Shards, None), ("key_range", run_arguments.KeyRangeText, None))
app.command("serve")(_command)
