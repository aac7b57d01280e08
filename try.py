import sys,time
from proof.simulation.run import play
from proof.simulation.slots import Slots
t=time.monotonic()
bad=0
for seed in range(int(sys.argv[1]),int(sys.argv[2])):
    for size in (3,5):
        o=play(seed,size,run=Slots)
        print(seed,size,o.acquisitions,o.detail, f"{o.seconds:.1f}")
        bad+=bool(o.violation)
print(time.monotonic()-t, bad)
