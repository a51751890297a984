"""The equivalence checker: is every split of a window the full batch, for a model of one's own, and if not, why?"""
