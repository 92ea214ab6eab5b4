"""Model directories of Hugging Face's layout: which files count, what they must hold, and how a model is made of them.

weight_files   the index or the one file, and where each tensor is         no torch
adapter_files  what is an adapter's, and no model's                          no torch
small_files    config.json and what else is small, within bounds             no torch
vocabulary     the tokenizer's ids against the rows that the model has       no torch
quantized      tensors that are stored in fewer bits, as the numbers they represent
loading        the model with these weights: all of them, and no others
"""
