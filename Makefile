# Short names for ./dev, which does the work: see `./dev help`.
.PHONY: demo test lint bench help
help demo test lint:
	@./dev $@ $(ARGS)
bench:
	@./dev bench $(WHAT) $(ARGS)
