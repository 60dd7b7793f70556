"""Model folders as they come from the hub: what their files say, in our words. Nothing here knows of caches
or steps.

    families.py      config.json: the families of models, and what is refused
    checkpoint.py    the weights: every tensor's name and shape
    vocabulary.py    the tokenizer files: tokens, which of them are special
    template.py      the chat template, somebody else's program
"""
