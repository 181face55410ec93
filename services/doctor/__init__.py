"""`stagemesh doctor`: looks at a node, and at the mesh that it joins, before or while one runs.

    gather facts (effects) ─> check them (pure) ─> findings ─> a report in text or JSON

Starts nothing, changes nothing, downloads nothing, and imports no torch.
"""
