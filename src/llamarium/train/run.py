"""The training loop: training steps, validations, samples and checkpoints.

A checkpoint contains everything that determines the next step: on a CPU, a resumed run has exactly the same weights.
Progress is reported as events, dicts of JSON values, to `metrics.jsonl`, the terminal and the trackers.
"""

import dataclasses
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from signal import SIGINT
from typing import Any

import torch
from torch.optim import Optimizer

from llamarium.api import Llama
from llamarium.cost import flops, peak_flops
from llamarium.errors import LlamariumError, TrainingError, counted, warn_caller
from llamarium.kernels.memory import keep_freed
from llamarium.model import LlamaForCausalLM
from llamarium.sampling.keywords import SamplingKeywords
from llamarium.train.alarms import Alarms
from llamarium.train.data.batch import TrainingBatch
from llamarium.train.data.order import Order, derived_seed
from llamarium.train.journal import Emit, Event
from llamarium.train.objectives.base import Trunk
from llamarium.train.optim import make_optimizers, optimizer_tensors, schedule, set_learning_rate
from llamarium.train.rewards.functions import StoppedError
from llamarium.train.setup import Setup, describe
from llamarium.train.state.checkpoint import (
    checkpoint_folder,
    checkpoint_step,
    checkpoints,
    latest_checkpoint,
    save_checkpoint,
)
from llamarium.train.state.resume import Position, restore_run, save_resume, saved_threads
from llamarium.train.state.signals import stop_signals
from llamarium.train.step import StepResult, any_learned, checkpoint_layers, measure, train_step
from llamarium.train.threads import Threads, computing

_MAX_NOT_FINITE = 20  # consecutive non-finite gradients after which the run fails
_SAMPLE_TEMPERATURE = 0.8


@dataclass(frozen=True, slots=True)
class TrainingResult:
    """Result of a run.

    Attributes:
        position: Last step and counters.
        checkpoint: Folder of the last checkpoint.
        signal: Signal that stopped the run, or None.
        was_over: True if the run was already complete when it was resumed.
        chat: True if the model was trained on dialogs.
    """

    position: Position
    checkpoint: Path
    signal: int | None
    was_over: bool
    chat: bool


def run(setup: Setup, out: Path, *, resume: bool, allow_changes: bool = False, emit: Emit) -> TrainingResult:
    """Train until the last step, or until SIGTERM or SIGINT, and save a checkpoint. The caller holds the `run_lock`.

    Args:
        setup: The prepared run.
        out: Folder of the run.
        resume: Continue from the newest intact checkpoint, if any.
        allow_changes: Resume even if settings or data have changed.
        emit: Called with each event.

    Raises:
        TrainingError: If there are checkpoints and `resume` is false; if settings or data have changed; if no token has
            a label; if weights or gradients are not finite; if no step updated the weights.
        OutputError: If a checkpoint cannot be written.
    """
    config, model = setup.config, setup.model
    check_start(out, resume)
    newest = latest_checkpoint(out) if resume else None
    setup.process_group.check_equal("checkpoints", newest.name if newest else "none")
    setup.process_group.check_equal("data", setup.train.fingerprint)
    setup.process_group.check_equal("precision", config.precision)
    if not any_learned(setup.train):
        raise TrainingError("no label of the training data counts: all are masked; there is nothing to learn")
    if model.device.type == "cpu":
        keep_freed()
    setup.process_group.shard_model(model)
    name, rate = config.chosen_optimizer
    optimizers = make_optimizers(
        model, name, learning_rate=rate, weight_decay=config.weight_decay, betas=(config.beta1, config.beta2),
        muon_learning_rate=config.muon_learning_rate,
    )  # fmt: skip
    position = Position()
    if newest is not None:
        position = restore_run(setup, newest, optimizers, allow_changes)
    _check_finite(model, "the model" if newest is None else str(newest))
    if config.checkpoint_activations:
        checkpoint_layers(model)
    best = {name: position.to_dict()[name] for name in ("best_loss", "best_step")}
    with computing(setup, newest and saved_threads(newest), resumed=newest is not None) as threads:
        about = {**describe(setup), **(threads.describe() if threads else {})}
        emit({"event": "resume" if newest else "start", "step": position.step, **best, **about})
        return _Loop(setup, out, position, optimizers, threads, emit).go(newest)


def check_start(out: Path, resume: bool) -> None:
    """Raise TrainingError if the folder has checkpoints and the run does not resume; reads and writes nothing else."""
    if not resume and (found := checkpoints(out)):
        raise TrainingError(
            f"{out}: holds a run ({found[-1].name}); resume it (--resume), or choose another folder (--out)"
        )


def _check_finite(model: LlamaForCausalLM, where: str) -> None:
    """Check that the trainable weights (this process's shards of them) are finite."""
    for key, parameter in model.named_parameters():
        values: Any = parameter.detach()
        if parameter.requires_grad and not getattr(values, "to_local", lambda v=values: v)().isfinite().all():
            raise TrainingError(
                f"{where}: {key} has weights that are NaN or infinite, from which nothing can be learned; begin with "
                "another model, or go on from another checkpoint"
            )


class _Loop:
    def __init__(
        self, setup: Setup, out: Path, at: Position, optimizers: list[Optimizer], threads: Threads | None, emit: Emit
    ) -> None:
        self.setup, self.out, self.at, self.optimizers, self.emit = setup, out, at, optimizers, emit
        self.threads = threads
        self.process_group, self.rollouts = setup.process_group, setup.rollouts
        seed, group = setup.config.seed, setup.process_group
        self.order = Order(setup.train, seed, at.cursor, shard_idx=group.shard_idx, num_shards=group.num_shards)
        self.trunk: Trunk = torch.compile(setup.trunk) if setup.config.compile else setup.trunk
        # a backward pass costs two forward passes, or one if most weights are frozen
        length, passes = setup.train.context, 3 if all(p.requires_grad for p in setup.model.parameters()) else 2
        self.flops_per_token = passes * flops(setup.model.config, length, num_logits=length) / length
        device = setup.model.device
        self.gpu = torch.cuda.get_device_name(device) if device.type == "cuda" else ""
        if self.rollouts is not None:
            self.rollouts.trunk = self.trunk
        self.alarms = Alarms(setup.config, at.alarms)
        self.num_not_finite = self.num_skipped = 0  # consecutive
        self.window_tokens, self.window_seconds = 0, 0.0

    def go(self, checkpoint: Path | None) -> TrainingResult:
        config, at = self.setup.config, self.at
        self.setup.model.train()
        was_over = self._is_over()
        with stop_signals(self.rollouts and self.rollouts.rewards, self._tell_stopping) as came:
            stopped = self.process_group.any_signal(came)
            while not stopped and not self._is_over():
                result, improved = None, False
                try:
                    if at.is_validated:  # else the run was stopped during the validation of this step
                        result = self._step()
                        if self._due(config.log_every):
                            self._log(result)
                        else:
                            self.emit({"event": "progress", **self._numbers(result)})
                        self._emit_all(self.alarms.after_step(at.step, result.metrics))
                    at.is_validated = False
                    improved = self._due(config.eval_steps) and self._validate()
                    at.is_validated = True
                    if result and config.sample_steps and self._due(config.sample_steps):
                        self._sample()
                except StoppedError:
                    what = f"step {at.step + 1}" if at.is_validated else f"the validation of step {at.step}"
                    warn_caller(f"stopped while rewards were computed: {what} begins anew when the run goes on")
                stopped = self.process_group.any_signal(came)
                if improved or stopped or self._due(config.save_every):
                    checkpoint = self._save()
            if checkpoint is None or checkpoint_step(checkpoint) != at.step:  # stopped before a step, or after its save
                checkpoint = self._save()
        ended = {
            "signal": stopped[0] if stopped else None,
            "early": at.step < config.steps and not stopped,
            "without_signal": at.num_without_signal,
        }
        self.emit({"event": "end", "step": at.step, **ended})
        return TrainingResult(at, checkpoint, stopped[0] if stopped else None, was_over, self.setup.chat)

    def _tell_stopping(self, signal: int) -> None:
        presses = "once more" if signal == SIGINT else "twice"
        doing = f"stopping: the step is finished and saved; Ctrl-C {presses} ends at once, and saves nothing"
        self.emit({"event": "progress", "step": self.at.step, "doing": doing, "signal": signal})

    def _is_over(self) -> bool:
        """Return whether all steps are done and validated, or the loss has not improved for `patience` validations."""
        config, at = self.setup.config, self.at
        return (at.step >= config.steps and at.is_validated) or 0 < config.patience <= at.num_since_best

    def _due(self, every: int) -> bool:
        return self.at.step % every == 0 or self.at.step == self.setup.config.steps

    def _step(self) -> StepResult:
        config, at = self.setup.config, self.at
        begin = time.perf_counter()
        batches, reported = self._batches()
        factor = schedule(
            at.step, name=config.schedule, warmup_steps=config.num_warmup_steps, num_steps=config.steps,
            final_ratio=config.final_ratio, decay_share=config.decay_share,
        )  # fmt: skip
        set_learning_rate(self.optimizers, factor)
        first = result = self._update(batches)
        for _ in range(1, self.rollouts.num_iterations if self.rollouts else 1):
            assert self.rollouts is not None
            reported |= {"largest_difference": first.metrics["largest_difference"]}  # before the weights change
            before, result = result, self._update(self.rollouts.again())
            if before.updated and result.skip_reason == "no signal":  # all ratios are clipped: the step is complete
                result = replace(result, skip_reason=None)
        result = replace(result, metrics={**result.metrics, **reported})
        seconds = time.perf_counter() - begin
        at.step, at.cursor = at.step + 1, self.order.cursor
        at.seconds += seconds
        self.window_seconds += seconds
        self._check_updated(result)
        return result

    def _batches(self) -> tuple[Sequence[TrainingBatch], dict[str, float]]:
        """Return the step's batches, from the data or sampled from the model, and metrics of the sampling."""
        config = self.setup.config
        if self.rollouts is None:
            return [self.order.take(config.batch_rows) for _ in range(config.gradient_accumulation_steps)], {}
        self._doing("sampling answers")
        return self.rollouts.sample(self.order.places(self.rollouts.prompts_per_step), self.at.step)

    def _update(self, batches: Sequence[TrainingBatch]) -> StepResult:
        config, group = self.setup.config, self.process_group
        with seeded(config.seed, self.at.step * group.num_shards + group.shard_idx, self.setup.model.device):
            result = train_step(
                self.setup.model, self.optimizers, batches, max_grad_norm=config.max_grad_norm,
                precision=config.chosen_precision, trunk=self.trunk, objective=self.setup.objective,
                process_group=group, has_signal=self.rollouts is None or self.rollouts.has_signal(),
            )  # fmt: skip
        self.at.num_tokens += result.num_tokens
        self.window_tokens += result.num_tokens
        return result

    def _check_updated(self, found: StepResult) -> None:
        """Report a skipped update; raise after too many non-finite ones, or at the end of a run without any update."""
        at, reason = self.at, found.skip_reason
        self.num_not_finite = self.num_not_finite + 1 if reason == "not finite" else 0
        self.num_skipped = 0 if reason is None else self.num_skipped + 1
        at.num_without_signal += reason == "no signal"
        if reason is not None:
            numbers = {"loss": found.loss, "grad_norm": found.grad_norm, "in_a_row": self.num_skipped}
            self.emit({"event": "skipped", "step": at.step, "reason": reason, **numbers})
        if self.num_not_finite >= _MAX_NOT_FINITE:
            raise TrainingError(
                f"the gradients of {counted(self.num_not_finite, 'step')} in a row were not finite "
                f"(loss {found.loss}); the "
                "weights are as they were before: lower the learning rate, or use float32"
            )
        has_state = any(optimizer.state for optimizer in self.optimizers)
        if at.step == self.setup.config.steps and not has_state and not at.num_without_signal:
            raise TrainingError(
                f"none of {counted(at.step, 'step')} could move the weights: gradients were not finite, "
                "or no token had "
                "a label; check the data and the model that the run began with"
            )

    def _numbers(self, found: StepResult) -> dict[str, Any]:
        """Return the metrics of a step."""
        config, at = self.setup.config, self.at
        return {
            "step": at.step,
            "loss": found.loss,
            "grad_norm": found.grad_norm,
            "learning_rate": self.optimizers[0].param_groups[0]["lr"],
            "epoch": at.cursor.epoch + at.cursor.index / self.setup.train.num_rows(at.cursor.epoch),
            "num_tokens": at.num_tokens,
            "tokens_per_s": self.window_tokens / self.window_seconds,
            "seconds": at.seconds,
            "seconds_left": (config.steps - at.step) * at.seconds / at.step,
            **found.metrics,
        }

    def _emit_all(self, events: Sequence[Event]) -> None:
        for event in events:
            self.emit(event)

    def _doing(self, what: str) -> None:
        self.emit({"event": "progress", "step": self.at.step, "doing": what})

    def _log(self, found: StepResult) -> None:
        config, numbers = self.setup.config, self._numbers(found)
        # a frozen base may be in half precision
        half = config.chosen_precision == "bfloat16" or self.setup.model.dtype != torch.float32
        peak = peak_flops(self.gpu, "bfloat16" if half else "float32")
        flops_per_s = numbers["tokens_per_s"] * self.flops_per_token
        mfu = None if peak is None else flops_per_s / (peak * self.process_group.world_size)
        self.emit({"event": "step", **numbers, "mfu": mfu})
        self.window_tokens, self.window_seconds = 0, 0.0

    def _validate(self) -> bool:
        """Measure the validation loss, and return whether it is the best so far."""
        if self.setup.validation is None:
            return False
        config = self.setup.config
        self._doing("measuring the validation loss")
        evaluation = self.rollouts.evaluate() if self.rollouts else measure(
            self.setup.model, self.setup.validation, batch_rows=config.batch_rows, max_rows=config.eval_rows,
            precision=config.chosen_precision, trunk=self.trunk, objective=self.setup.objective,
            process_group=self.process_group,
        )  # fmt: skip
        improved = evaluation.loss < self.at.best_loss
        self.at.num_since_best = 0 if improved else self.at.num_since_best + 1
        if improved:
            self.at.best_loss, self.at.best_step = evaluation.loss, self.at.step
        at, loss = self.at, evaluation.loss
        self.emit({"event": "validation", "step": at.step, "loss": loss, "best": improved, **evaluation.metrics})
        self._emit_all(self.alarms.after_validation(at.step, loss, at.best_loss, at.best_step))
        return improved

    def _sample(self) -> None:
        if self.rollouts is not None:
            self.emit({"event": "group", "step": self.at.step, **self.rollouts.to_event()})
            return
        model, config = self.setup.model, self.setup.config
        event = {"event": "sample", "step": self.at.step, "prompt": config.sample_prompt}
        if self.process_group.world_size > 1:
            why = "not made while the weights are spread over several processes; generate from a checkpoint"
            self.emit({**event, "error": why})
            return
        self._doing("writing a sample")
        llama = Llama("the model", model.eval(), self.setup.tokenizer)
        try:
            options: SamplingKeywords = {
                "max_tokens": config.sample_tokens, "temperature": _SAMPLE_TEMPERATURE, "seed": config.seed,
            }  # fmt: skip
            if self.setup.chat:
                answer = llama.chat([{"role": "user", "content": config.sample_prompt}], **options)
            else:
                answer = llama.generate(config.sample_prompt, **options)
            self.emit({**event, "text": answer.text})
        except LlamariumError as error:  # e.g. a prompt that the tokenizer cannot encode: no reason to stop the run
            self.emit({**event, "error": str(error)})
        finally:
            model.train()

    def _save(self) -> Path:
        self._doing("saving a checkpoint")
        remembered = optimizer_tensors(self.setup.model, self.optimizers)
        state = {
            "position": self.at.to_dict(),
            "kind": type(self.setup.config).__name__,
            "settings": dataclasses.asdict(self.setup.config),
            "data": self.setup.train.fingerprint,
            "about": dict(self.setup.train.about),
            "reward": self.rollouts.rewards.digest if self.rollouts else "",
            **({} if self.threads is None else {"threads": self.threads.count}),
        }

        def write(folder: Path) -> None:
            self.setup.save(folder)
            save_resume(folder, remembered, state, self.process_group.full_tensor)

        def save() -> None:
            most, best = self.setup.config.save_total_limit, self.at.best_step
            save_checkpoint(self.out, self.at.step, write, save_total_limit=most, best=best)

        self.process_group.on_rank_zero(save, [*self.setup.model.parameters(), *remembered.values()])
        saved = checkpoint_folder(self.out, self.at.step)
        self.emit({"event": "saved", "step": self.at.step, "path": str(saved), "best_step": self.at.best_step})
        return saved


@contextmanager
def seeded(seed: int, step: int, device: torch.device) -> Generator[None]:
    """Seed the random numbers of the body (dropout) from seed and step; restore the previous state afterwards."""
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices):
        torch.manual_seed(derived_seed("step", seed, step))
        yield
