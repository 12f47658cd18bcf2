"""Federated distillation of language models between organisations, on Flower."""

from pathlib import Path

__version__ = "0.1.0"

# The rooms (client/, common/, server/, ...) lie at the top of the repository. In a checkout and in a Flower app bundle
# they are found through this path; an installed wheel has them inside the package.
_root = Path(__file__).resolve().parent.parent
if (_root / "pyproject.toml").is_file():
    __path__.append(str(_root))
