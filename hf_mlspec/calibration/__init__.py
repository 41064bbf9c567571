"""How codes are chosen: statistics of calibration text, scales folded into what feeds a layer, codes, block by block.

methods.py has the words; pipeline.py puts the parts together. Of engines/ it imports the description of
architectures alone.
"""
