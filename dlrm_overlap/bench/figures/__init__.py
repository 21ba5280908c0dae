"""The figures, one file each: what is measured, who takes part, which columns a row has, and the headline.

The function `run` of a file measures its figure on all ranks. `forward` is no figure: it is the procedure that the
figures of the embedding stage's forward share.
"""
