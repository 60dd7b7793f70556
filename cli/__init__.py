"""What generate.py is made of. The engine knows nothing of it.

    options.py     the command line, and the texts that it names
    requests.py    these texts as ids, for the engine
    told.py        what is told of a run: answers, table, comparison, last words
    warmup.py      compile before the run starts
    lines.py       requests as JSON lines in, results as JSON lines out
    terminal.py    the live canvas and the trace
    chat.py        a conversation
    infill.py      texts with holes
"""
