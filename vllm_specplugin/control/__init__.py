"""How long to draft, and when not to: measured costs, observed acceptance, and the choice between them. Knows no engine."""
