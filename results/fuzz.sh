cd /work/fuzz; export PYTHONPATH=/work/fuzz/src:/work/fuzz OMP_NUM_THREADS=1 OMP_WAIT_POLICY=passive SOFTMAXFREE_DATA=/work/main/.data
( time /work/main/.venv/bin/python -m tests.fuzz.report --cases 100000 --out /tmp/lead/fuzzout ) > /tmp/lead/fuzz.log 2>&1
