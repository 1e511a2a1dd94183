import { type Clock, LonghaulError } from '../core/index.ts';

export function interrupted(): LonghaulError {
  return new LonghaulError('Interrupted', 'the run was interrupted and keeps its state');
}

/** Settles with the work, or fails as a broken sandbox when it is still going on at the deadline. */
export async function orOverdue<T>(
  work: Promise<T>,
  tool: string,
  deadline: number,
  clock: Clock,
): Promise<T> {
  const settled = new AbortController();
  work.finally(() => settled.abort()).catch(() => {});
  const overdue = clock.sleep(deadline - clock.now(), settled.signal).then((): never => {
    throw new LonghaulError('SandboxBroken', `${tool} did not answer within its limit`);
  });
  overdue.catch(() => {});
  return Promise.race([work, overdue]);
}

/** Settles with the work, or as soon as the signal aborts; work left behind may end unheard. */
export function orAbort<T>(work: Promise<T>, signal: AbortSignal): Promise<T> {
  if (signal.aborted) {
    work.catch(() => {});
    return Promise.reject(interrupted());
  }
  return new Promise<T>((resolve, reject) => {
    const onAbort = () => reject(interrupted());
    signal.addEventListener('abort', onAbort, { once: true });
    work.then(resolve, reject).finally(() => signal.removeEventListener('abort', onAbort));
  });
}
