"""What server and sites share: the wire, configuration, models, data and the papers' maths."""
