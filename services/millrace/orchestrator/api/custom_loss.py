"""Ask what the trainers announced, when a run is submitted, whether one of them may load its loss."""

from millrace.config import RLConfig
from millrace.custom_code import CustomCode
from millrace.orchestrator.workers import WorkerKind, WorkerRegistry

FIELD = "trainer.loss.import_path"


def require_loadable_loss(config: RLConfig, registry: WorkerRegistry) -> None:
    """InvalidSpecError if the loss is a function of the user's own whose module no registered trainer may load.

    Whether the function is any good is for the trainer to say, which has what it imports.
    """
    import_path = config.trainer.loss.import_path
    codes = [CustomCode(tuple(each.worker.custom_modules)) for each in registry.alive(WorkerKind.TRAINER)]
    if import_path is None or any(code.allows(import_path.partition(":")[0]) for code in codes):
        return
    if codes:  # without a trainer the run waits for one, which looks itself
        codes[0].require(import_path, field=FIELD, service="the trainer")
