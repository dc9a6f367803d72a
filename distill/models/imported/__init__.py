"""A GGUF file as a Hugging Face folder: the inverse of distill/export.

importing.py is the way in: `folder_of` for everything that reads a model by its folder, `import_gguf` for the command.
configuration.py makes config.json, weights.py the tensors, tokenizer.py the tokenizer's files.
"""
