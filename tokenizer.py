class Tokenizer:
    @classmethod
    def from_folder(cls,p): return None
