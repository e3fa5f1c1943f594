"""The scheduler and admission over a virtual clock: what the engine would do on a card, computed without one."""
