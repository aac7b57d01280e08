// What `benchmarks/worker.py` is for Python, for node-redlock: the same orders, the same answers.
// Run with NODE_PATH at the folder of its packages.
'use strict';

const readline = require('readline');
const Redis = require('ioredis');
const redlockModule = require('redlock');

const TTL_MS = 10000;
const RETRY_DELAY_MS = 200; // its own default, and as much jitter as it has
const Redlock = redlockModule.default || redlockModule;
const setting = JSON.parse(process.argv[3]);

const limits = setting.node_timeout === null ? {} : {
  commandTimeout: setting.node_timeout * 1000, maxRetriesPerRequest: 0,
};
const clients = setting.urls.map((url) => {
  const client = new Redis(url, limits);
  client.on('error', () => {});
  return client;
});
const redlock = new Redlock(clients, { retryCount: 0 });
redlock.on('error', () => {}); // it tells of each node, also where a majority granted the lock

const sleep = (milliseconds) => new Promise((resolve) => setTimeout(resolve, milliseconds));

// The clock of `time.monotonic`.
const now = () => Number(process.hrtime.bigint()) / 1e9;

// Its own retries keep the votes that a try has got. Two who have two votes each would wait for each other
// until these expire; so each try here is one of its own, after the delay that it has by default.
async function acquire(resource) {
  for (;;) {
    try {
      return await redlock.acquire([resource], TTL_MS);
    } catch (error) {
      if (!setting.waiting) throw error;
      await sleep(RETRY_DELAY_MS + (2 * Math.random() - 1) * 100);
    }
  }
}

async function takeTurns(resource, until, score) {
  for (let asked = now(); asked < until; asked = now()) {
    try {
      const lock = await acquire(resource);
      const acquired = now();
      await lock.release();
      score.turns.push([asked, acquired, now()]);
    } catch (error) {
      score.failures += 1;
      score.error = score.error || String(error).slice(0, 300);
      await new Promise(setImmediate);
    }
  }
}

async function main() {
  for await (const line of readline.createInterface({ input: process.stdin })) {
    const { resources, since, until } = JSON.parse(line);
    const score = { turns: [], failures: 0, error: null };
    await sleep(Math.max(0, 1000 * (since - now())));
    const before = process.cpuUsage();
    const began = now();
    await Promise.all(resources.map((resource) => takeTurns(resource, until, score)));
    const { user, system } = process.cpuUsage(before);
    const answer = { ...score, began, ended: now(), cpu: (user + system) / 1e6 };
    process.stdout.write(JSON.stringify(answer) + '\n');
  }
  process.exit(0);
}

main();
