"""The whole demo: both runs from one start, their comparison, a sample."""

import pathlib
import time
from collections.abc import Sequence

import jax
from flax import nnx

import jax_fused_adamw as jfa
from jax_fused_adamw.demo import _report
from jax_fused_adamw.demo._data import BATCH, CONTEXT, Corpus
from jax_fused_adamw.demo._model import GPT, sample
from jax_fused_adamw.demo._train import OPTIMIZERS, Run, check_platform, train

_SAMPLE_BYTES = 240


def run_experiment(
    optimizers: Sequence[str],
    corpus: Corpus,
    steps: int,
    seed: int,
    out: pathlib.Path,
) -> None:
    """Trains, prints and saves.

    Args:
      optimizers: keys of ``OPTIMIZERS``; the sample is the first one's.
      corpus: the text.
      steps: training steps of each run.
      seed: of the first parameters, the batches and the sample.
      out: a folder, made if missing.

    Raises:
      DemoError: no device, no kernel for it, or a folder that cannot be written.
    """
    started = time.perf_counter()
    check_platform(optimizers)
    _report.prepare_folder(out)
    graphdef, params = nnx.split(GPT(CONTEXT, rngs=nnx.Rngs(seed)))
    setting = _setting(corpus, params, steps, seed)
    _report.print_setting(setting, str(jfa.kernel_info()))
    runs = {
        name: train(OPTIMIZERS[name], graphdef, params, corpus, steps, seed)
        for name in optimizers
    }
    comparison = _report.compare(**runs) if len(runs) == 2 else None
    prompt, text = _sample(runs[optimizers[0]], graphdef, corpus, seed)
    _report.print_losses(list(runs.values()))
    _report.print_summary(list(runs.values()), comparison)
    _report.print_sample(runs[optimizers[0]].label, prompt, text)
    results = {
        **setting,
        "runs": {name: _report.figures(run) for name, run in runs.items()},
        "comparison": comparison,
        "sample": {"optimizer": optimizers[0], "prompt": prompt, "text": text},
    }
    _report.save(out, results, list(runs.values()))
    print(f"\nSaved in {out} after {time.perf_counter() - started:.0f} seconds.")


def _setting(corpus: Corpus, params: nnx.State, steps: int, seed: int) -> dict:
    device = jax.devices()[0]
    return {
        "text": corpus.source,
        "num_files": corpus.num_files,
        "num_bytes": len(corpus.train) + len(corpus.held_out),
        "num_parameters": sum(p.size for p in jax.tree.leaves(params)),
        "context": CONTEXT,
        "batch": BATCH,
        "steps": steps,
        "seed": seed,
        "device": device.device_kind,
        "platform": device.platform,
        "jax": jax.__version__,
    }


def _sample(
    run: Run, graphdef: nnx.GraphDef, corpus: Corpus, seed: int
) -> tuple[str, str]:
    """The last held-out bytes, and what the trained model puts after them."""
    prompt = corpus.held_out[-CONTEXT:]
    key = jax.random.key(seed)
    text = sample(run.params, graphdef, prompt, key, _SAMPLE_BYTES)
    return _report.printable(prompt), _report.printable(text)
