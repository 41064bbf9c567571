"""How are the codes of a quantized model chosen, and what is done to its weights before?"""
