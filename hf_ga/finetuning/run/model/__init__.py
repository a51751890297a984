"""From a name to a model: load it, freeze or adapt parts of it, and check what was saved.

In: `--model_name_or_path`. Out: model and tokenizer. Begin with models.py; adapters.py adds LoRA or
freezes, embeddings.py builds `--task embedding`, reload.py compares the saved model.
"""
