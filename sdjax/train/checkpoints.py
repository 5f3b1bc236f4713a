"""Orbax checkpoints. Checkpoint k is the state after k updates, with everything that a resumed run needs."""

from pathlib import Path
from typing import Any

import jax
import orbax.checkpoint as ocp

from sdjax.errors import CheckpointError

_STATE, _PROGRESS = "state", "progress"
_PIECE_BYTES = 256 * 2**20


class Checkpoints:
    """Numbered checkpoints of one run. Step 0 is always kept: it holds the reference policy.

    Args:
      directory: absolute path.
      keep: how many of the newest to keep beside step 0.
      asynchronous: write in the background; the outcome of each write is checked before the next and at ``close``.
    """

    def __init__(self, directory: Path, *, keep: int, asynchronous: bool):
        self.directory = directory
        policy = ocp.checkpoint_managers
        self._manager = ocp.CheckpointManager(
            directory,
            options=ocp.CheckpointManagerOptions(
                preservation_policy=policy.AnyPreservationPolicy(
                    [policy.LatestN(keep), policy.CustomSteps([0])],
                ),
                enable_async_checkpointing=asynchronous,
                create=True,
            ),
        )

    def steps(self) -> list[int]:
        return sorted(self._manager.all_steps())

    def save(self, step: int, state: Any, progress: dict[str, Any]) -> None:
        """Starts writing.

        Raises CheckpointError if this or the previous write failed (full disk, read-only directory).
        """
        try:
            self._manager.wait_until_finished()
            self._manager.save(
                step,
                args=ocp.args.Composite(
                    **{
                        _STATE: ocp.args.StandardSave(state, jax.tree.map(_pieces, state)),
                        _PROGRESS: ocp.args.JsonSave(progress),
                    }
                ),
            )
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(step, error) from error

    def wait(self) -> None:
        """Blocks until the last save is on disk."""
        try:
            self._manager.wait_until_finished()
        except (OSError, ValueError, RuntimeError) as error:
            raise self._failed(None, error) from error

    def progress(self, step: int) -> dict[str, Any]:
        restored = self._restore(step, ocp.args.Composite(**{_PROGRESS: ocp.args.JsonRestore()}))
        return restored[_PROGRESS]

    @staticmethod
    def abstract(state: Any) -> Any:
        """Shapes, dtypes and shardings of a state, without its arrays."""
        return jax.tree.map(ocp.utils.to_shape_dtype_struct, state)

    def restore(self, step: int, like: Any) -> Any:
        """Restores the state with the shapes, dtypes and shardings of ``like``, on whatever devices it was saved.

        Raises:
          CheckpointError: the checkpoint is damaged or belongs to another model; the message names it.
        """
        restored = self._restore(step, ocp.args.Composite(**{_STATE: ocp.args.StandardRestore(self.abstract(like))}))
        return restored[_STATE]

    def close(self) -> None:
        self.wait()
        self._manager.close()

    def _restore(self, step: int, args: ocp.args.Composite) -> Any:
        try:
            return self._manager.restore(step, args=args)
        except (OSError, ValueError, KeyError, TypeError) as error:
            raise CheckpointError(
                f"{self.directory / str(step)} cannot be read as a checkpoint of this run: {error}",
                "if it belongs to another model or method, use another --workdir; if it is damaged, delete that folder "
                "and start again: the run goes on from the checkpoint before it.",
            ) from error

    def _failed(self, step: int | None, error: Exception) -> CheckpointError:
        which = f"checkpoint {step}" if step is not None else "a checkpoint"
        older = ", ".join(map(str, self.steps())) or "none"
        return CheckpointError(
            f"{which} could not be written to {self.directory}: {error} (complete checkpoints: {older}).",
            "free disk space or make the directory writable, then start the same command again.",
        )


def _pieces(x: Any) -> ocp.SaveArgs:
    """Stacks of layers are stored layer by layer, so that an export reads one at a time."""
    return ocp.SaveArgs(chunk_byte_size=_PIECE_BYTES, shard_axes=(0,) if x.ndim > 2 else ())
