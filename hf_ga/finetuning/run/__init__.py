"""The fine-tuning command `hf-ga`, and `hf_ga.finetune`: from flags and a dataset to a trained
model on disk.

In: flags (flags/). Out: a folder (results/). Begin with finetune.py: a run is built (build.py,
model/), trained (loop.py), evaluated (scores/), saved and resumed (results/). The update of a
window is in `hf_ga.engine` and `hf_ga.training`.
"""

from importlib.util import find_spec

from hf_ga.errors import MissingPackage

# Packages that every run imports: name of the module -> name of the package on PyPI. All are in
# the extra `finetune` of pyproject.toml.
PACKAGES = {
    "datasets": "datasets",
    "evaluate": "evaluate",
    "jinja2": "jinja2",
    "matplotlib": "matplotlib",
    "pyarrow": "pyarrow",
    "pytrec_eval": "pytrec-eval-terrier",
    "rouge_score": "rouge-score",
    "seqeval": "seqeval",
    "scipy": "scipy",
    "sklearn": "scikit-learn",
    "yaml": "pyyaml",
}


_missing = [package for module, package in PACKAGES.items() if find_spec(module) is None]
if _missing:
    raise MissingPackage(
        f"fine-tuning needs packages that are not installed ({', '.join(_missing)}): "
        'pip install "hf_ga[finetune]".'
    )
