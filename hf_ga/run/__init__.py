"""The fine-tuning command `hf-ga`, and `hf_ga.finetune`: from flags and a dataset to a trained
model on disk.

A run is built (`build`), trained (`loop`), evaluated (`evaluation`), saved (`saving`, `outputs`)
and resumed here; the update of a window is in `hf_ga.exact` and `hf_ga.training`.
"""
