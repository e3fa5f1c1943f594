"""Tables that several commands print."""

from rich.console import Console
from rich.table import Table

from longlane.errors import counted
from longlane.types import MemoryPlan

MIB, GIB = 1 << 20, 1 << 30


def print_plan(plan: MemoryPlan, console: Console | None = None) -> None:
    """The pools of a memory plan, then what each lane gets."""
    console = console or Console()
    table = Table(title=f"Memory plan: {human_bytes(plan.device_bytes)}", title_justify="left")
    table.add_column("pool")
    table.add_column("size", justify="right")
    table.add_column("what", overflow="fold")
    for pool in plan.pools:
        table.add_row(pool.name, human_bytes(pool.bytes), pool.note)
    free = plan.device_bytes - sum(pool.bytes for pool in plan.pools)
    table.add_row("not used", human_bytes(free))
    console.print(table)
    each = "it is guaranteed" if plan.lanes == 1 else "with all of them full each is guaranteed"
    console.print(
        f"KV: {plan.kv_tokens:,} tokens ({plan.kv_dtype}) for {counted(plan.lanes, 'lane')} of up to "
        f"{plan.max_context:,}; {each} {plan.guaranteed_context:,}.",
        highlight=False,
    )


def human_bytes(size: int) -> str:
    """Binary units with two decimals."""
    return f"{size / GIB:.2f} GiB" if size >= GIB else f"{size / MIB:.1f} MiB"
