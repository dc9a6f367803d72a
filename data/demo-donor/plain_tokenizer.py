from transformers import PreTrainedTokenizerFast


class PlainTokenizer(PreTrainedTokenizerFast):
    """The tokenizer.json beside this file, as it stands."""
