"""The fine-tuning command `hf-ga`, and `hf_ga.finetune`: from flags and a dataset to a trained model on disk.

A run is built once (`build`), trained (`loop`), evaluated, saved (`saving`, `outputs`) and resumed here; how a window becomes an
update is in `hf_ga.exact` and `hf_ga.training`.
"""
