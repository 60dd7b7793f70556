PUBLISHED={}
def find_table(path, layers): return None
def lookup(table,P,T): return 0
