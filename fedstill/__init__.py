"""Federated distillation of language models between organisations, on Flower.

import fedstill

result = fedstill.run("experiments/demo.toml", on="process", set={"method.name": "ds-fl"})
result.central, result.sites, result.history, result.folder, result.model()
"""

from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any

__version__ = "0.2.0"

# The packages (client/, common/, server/, ...) lie at the top of the repository. In a checkout and in a Flower bundle
# they are found through this path; an installed wheel has them inside the package.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))

if TYPE_CHECKING:
    from fedstill.api import Classifier, Result, run
    from fedstill.common.config import ConfigError, RunConfig
    from fedstill.common.config.files import load_run
    from fedstill.common.data.tasks import TASKS, Task
    from fedstill.common.wire import Ask, Reply
    from fedstill.common.wire.typed import Message
    from fedstill.server.federation import Federation
    from fedstill.strategies import METHODS
    from fedstill.strategies.base import Method, Params, Round
    from fedstill.strategies.verbs import Shield, site_verb

# The public names, and where each is defined. They are imported on first use, so that `import fedstill` is fast.
_HOMES = {
    "run": "fedstill.api",
    "Result": "fedstill.api",
    "Classifier": "fedstill.api",
    "load_run": "fedstill.common.config.files",
    "RunConfig": "fedstill.common.config",
    "ConfigError": "fedstill.common.config",
    "Federation": "fedstill.server.federation",
    "Method": "fedstill.strategies.base",
    "Params": "fedstill.strategies.base",
    "Round": "fedstill.strategies.base",
    "Ask": "fedstill.common.wire",
    "Reply": "fedstill.common.wire",
    "Message": "fedstill.common.wire.typed",
    "site_verb": "fedstill.strategies.verbs",
    "Shield": "fedstill.strategies.verbs",
    "METHODS": "fedstill.strategies",
    "TASKS": "fedstill.common.data.tasks",
    "Task": "fedstill.common.data.tasks",
}

__all__ = [
    "METHODS",
    "TASKS",
    "Ask",
    "Classifier",
    "ConfigError",
    "Federation",
    "Message",
    "Method",
    "Params",
    "Reply",
    "Result",
    "Round",
    "RunConfig",
    "Shield",
    "Task",
    "__version__",
    "load_run",
    "run",
    "site_verb",
]


def __getattr__(name: str) -> Any:
    if name in _HOMES:
        return getattr(import_module(_HOMES[name]), name)
    raise AttributeError(f"module 'fedstill' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted(__all__)
