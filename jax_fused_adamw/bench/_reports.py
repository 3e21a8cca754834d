"""Which module prints, renders and draws a kind of run."""

from types import ModuleType

from jax_fused_adamw.bench import _report, _sharded_report, _train_report
from jax_fused_adamw.bench._results import Results, Run, ShardedResults, TrainResults

_REPORTS = {
    Results.kind: _report,
    TrainResults.kind: _train_report,
    ShardedResults.kind: _sharded_report,
}


def report_of(results: Run) -> ModuleType:
    """The module with ``print_results``, ``render_table`` and ``save_plot``."""
    return _REPORTS[results.kind]
