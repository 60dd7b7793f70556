"""Model folders as they come from the hub: what their files say, in our words. Nothing here knows of caches or steps.

    checkpoint.py    config.json and the weights: the families of models, every tensor's name and shape
    vocabulary.py    the tokenizer files: tokens, which of them are special
    template.py      the chat template, somebody else's program
"""
