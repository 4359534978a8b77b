"""The first minutes on a GPU: a ladder of stages, each with its result on disk before the next begins."""
