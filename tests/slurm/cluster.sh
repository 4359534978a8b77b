#!/usr/bin/env bash
# A real SLURM on this machine alone: one controller, virtual nodes on loopback, no systemd, no accounting.
#   cluster.sh install          Debian's packages (needs root and a package mirror)
#   cluster.sh start DIR NODES  begin; everything lies in DIR, clients need SLURM_CONF=DIR/slurm.conf
#   cluster.sh stop DIR         end every daemon that start began, by its pid file
set -euo pipefail

install() {
  command -v slurmctld slurmd munged sbatch > /dev/null && return
  apt-get update -qq
  DEBIAN_FRONTEND=noninteractive apt-get install -y -qq --no-install-recommends \
    slurm-wlm slurm-wlm-basic-plugins munge
}

configuration() { # DIR NODES
  local host cpus memory
  host=$(hostname -s)
  cpus=$(nproc)
  memory=$(($(awk '/MemTotal/ {print $2}' /proc/meminfo) / 1024 - 512))
  cat << CONF
ClusterName=memtrain
SlurmctldHost=$host(127.0.0.1)
SlurmUser=root
SlurmdUser=root
AuthType=auth/munge
CryptoType=crypto/munge
# A job that is queued again waits cred_expire + 1 s; the default is 120.
AuthInfo=cred_expire=5
StateSaveLocation=$1/state
SlurmdSpoolDir=$1/spool/%n
SlurmctldPidFile=$1/run/slurmctld.pid
SlurmdPidFile=$1/run/slurmd.%n.pid
SlurmctldLogFile=$1/log/slurmctld.log
SlurmdLogFile=$1/log/slurmd.%n.log
SlurmctldPort=16817
MpiDefault=none
MailProg=/bin/true
ProctrackType=proctrack/linuxproc
TaskPlugin=task/none
SwitchType=switch/none
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
SelectType=select/cons_tres
SelectTypeParameters=CR_Core
SchedulerType=sched/backfill
SchedulerParameters=sched_interval=2,bf_interval=2,requeue_delay=1,batch_sched_delay=0
MessageTimeout=30
SlurmctldTimeout=60
SlurmdTimeout=60
KillWait=15
MinJobAge=300
ReturnToService=2
JobRequeue=1
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
LaunchParameters=enable_nss_slurm
# Daemons listen where the name of the host leads and not everywhere: checked above to be loopback.
CommunicationParameters=NoCtldInAddrAny,NoInAddrAny
CONF
  local nodes="n[1-$2]"
  for i in $(seq 1 "$2"); do
    echo "NodeName=n$i NodeHostname=$host NodeAddr=127.0.0.1 Port=$((17000 + i)) CPUs=$cpus RealMemory=$memory"
  done
  echo "PartitionName=main Nodes=$nodes Default=YES MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=30"
  echo "PartitionName=abrupt Nodes=$nodes MaxTime=INFINITE PriorityTier=1 PreemptMode=REQUEUE GraceTime=0"
  echo "PartitionName=urgent Nodes=$nodes MaxTime=INFINITE PriorityTier=10 PreemptMode=OFF"
}

start() { # DIR NODES
  if ! getent ahostsv4 "$(hostname -s)" | grep -q '^127\.'; then
    echo "$(hostname -s) is not an address of this machine's loopback interface: the daemons would be open to the" >&2
    echo "network. Add '127.0.1.1 $(hostname -s)' to /etc/hosts." >&2
    exit 1
  fi
  mkdir -p "$1"/{state,spool,log,run}
  if ! munge -n > /dev/null 2>&1; then
    mkdir -p /run/munge
    chown munge: /run/munge
    runuser -u munge -- /usr/sbin/munged --force
    touch "$1/run/munged.ours"
  fi
  munge -n | unmunge > /dev/null
  configuration "$1" "$2" > "$1/slurm.conf"
  # Loaded and unused: 22.05 knows no 'disabled'.
  echo 'CgroupPlugin=cgroup/v1' > "$1/cgroup.conf"
  export SLURM_CONF=$1/slurm.conf
  [ -e "$1/run/slurmctld.pid" ] || /usr/sbin/slurmctld -c -f "$SLURM_CONF"
  for i in $(seq 1 "$2"); do
    mkdir -p "$1/spool/n$i"
    [ -e "$1/run/slurmd.n$i.pid" ] || /usr/sbin/slurmd -N "n$i" -f "$SLURM_CONF"
  done
  for _ in $(seq 1 60); do
    [ "$(sinfo -h -N -p main -t idle -o %N | wc -l)" = "$2" ] && return
    sleep 0.5
  done
  sinfo
  echo "the nodes did not come up; see $1/log" >&2
  exit 1
}

stop() { # DIR
  local file pid
  for file in "$1"/run/slurmd.*.pid "$1"/run/slurmctld.pid; do
    [ -e "$file" ] || continue
    pid=$(cat "$file")
    kill "$pid" 2> /dev/null || true
    for _ in $(seq 1 20); do kill -0 "$pid" 2> /dev/null && sleep 0.25 || break; done
    rm -f "$file"
  done
  if [ -e "$1/run/munged.ours" ]; then
    kill "$(cat /run/munge/munged.pid)" 2> /dev/null || true
    rm -f "$1/run/munged.ours"
  fi
}

"$@"
