"""The AdamW / AMSGrad step of a whole parameter tree in one native call, for optax."""

from jax_fused_adamw._accumulate import AccumulateState as AccumulateState
from jax_fused_adamw._accumulate import accumulate as accumulate
from jax_fused_adamw._adamw_step import adamw_step as adamw_step
from jax_fused_adamw._alias import fused_adamw as fused_adamw
from jax_fused_adamw._clip import ClipByGlobalNormState as ClipByGlobalNormState
from jax_fused_adamw._clip import clip_by_global_norm as clip_by_global_norm
from jax_fused_adamw._compute import compute_params as compute_params
from jax_fused_adamw._compute import value_and_grad as value_and_grad
from jax_fused_adamw._convert_optax import from_optax as from_optax
from jax_fused_adamw._convert_optax import to_optax as to_optax
from jax_fused_adamw._convert_torch import from_torch as from_torch
from jax_fused_adamw._convert_torch import to_torch as to_torch
from jax_fused_adamw._decay_report import DecayReport as DecayReport
from jax_fused_adamw._decay_report import decay_report as decay_report
from jax_fused_adamw._ffi import KernelInfo as KernelInfo
from jax_fused_adamw._ffi import NativeModule as NativeModule
from jax_fused_adamw._ffi import kernel_info as kernel_info
from jax_fused_adamw._in_place import InPlaceUpdate as InPlaceUpdate
from jax_fused_adamw._in_place import step as step
from jax_fused_adamw._loss_scale import DynamicLossScale as DynamicLossScale
from jax_fused_adamw._memory import MemoryEstimate as MemoryEstimate
from jax_fused_adamw._memory import memory_estimate as memory_estimate
from jax_fused_adamw._options import StepControl as StepControl
from jax_fused_adamw._resync import master_mismatch as master_mismatch
from jax_fused_adamw._resync import resync as resync
from jax_fused_adamw._shardings import state_shardings as state_shardings
from jax_fused_adamw._state import FusedAdamWState as FusedAdamWState
from jax_fused_adamw._stats import GradReport as GradReport
from jax_fused_adamw._stats import grad_stats as grad_stats
from jax_fused_adamw._stats_plan import StatsPlan as StatsPlan
from jax_fused_adamw._training_record import Restored as Restored
from jax_fused_adamw._training_record import TrainingRecord as TrainingRecord
from jax_fused_adamw._transform import FusedAdamW as FusedAdamW

__version__ = "0.1.0"
