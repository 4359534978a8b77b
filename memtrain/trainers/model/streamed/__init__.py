"""Decoder layers that pass over a row in slices: exact, with the intermediates of one slice at a time.

`row_slices` cuts a row; `layer_keys` holds a layer's keys and values; `attention` attends from a slice;
`layer_pass` is the autograd function of one layer; `apply` puts it on a model.
"""
